/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The real NVML, where the program has loaded it, and what of nvml.h is needed of it: that header is in no package that
 * the library is built with.
 */
#ifndef GGROUP_CUDA_NVML_H
#define GGROUP_CUDA_NVML_H

#include <stdbool.h>
#include <stdint.h>

typedef struct nvmlDevice_st *nvml_device;

enum { NVML_OK = 0, NVML_FUNCTION_NOT_FOUND = 13 };	/* of nvmlReturn_t */

/* NVML_DEVICE_UUID_V2_BUFFER_SIZE. */
#define NVML_UUID_BYTES 96

/* NVML_VALUE_NOT_AVAILABLE: the driver does not say. */
#define NVML_UNKNOWN UINT64_MAX

struct nvml_memory {		/* nvmlMemory_t; bytes, as all that follows */
	unsigned long long total;
	unsigned long long free;
	unsigned long long used;	/* with what is reserved */
};

struct nvml_memory_v2 {		/* nvmlMemory_v2_t */
	unsigned int version;
	unsigned long long total;
	unsigned long long reserved;
	unsigned long long free;
	unsigned long long used;	/* without */
};

struct nvml_process_v1 {	/* nvmlProcessInfo_v1_t */
	unsigned int pid;
	unsigned long long used;
};

struct nvml_process {		/* nvmlProcessInfo_v2_t, and nvmlProcessInfo_t */
	unsigned int pid;
	unsigned long long used;
	unsigned int gpu_instance;
	unsigned int compute_instance;
};

struct nvml_detail {		/* nvmlProcessDetail_v1_t */
	unsigned int pid;
	unsigned long long used;
	unsigned int gpu_instance;
	unsigned int compute_instance;
	unsigned long long protected;
};

struct nvml_processes {		/* nvmlProcessDetailList_v1_t */
	unsigned int version;
	unsigned int mode;
	unsigned int count;
	struct nvml_detail *details;
};

/* NULL where this NVML has no such entry point, and before it is open. */
struct nvml {
#define NVML(name, parameters, arguments) int (*name) parameters;
#include "nvml.def"
#undef NVML
	int (*nvmlDeviceGetUUID)(nvml_device device, char *uuid, unsigned int length);
};

extern struct nvml nvml;

/* Finds them all, once, where the program has loaded NVML; whether it has. */
bool nvml_loaded(void);

/* Whether they are found; nothing is looked for. */
bool nvml_opened(void);

void nvml_forget(void);		/* in the child of fork(): only its lock; NVML is still mapped */

#endif
