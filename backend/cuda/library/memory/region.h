/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elastic allocations: a reserved range of addresses, backed by chunks that are on the GPU or in pinned host
 * memory, at the same address. Chunks have the sizes of pool.h, the large ones first; what is smaller than
 * one shares it (small.h).
 */
#ifndef GGROUP_CUDA_REGION_H
#define GGROUP_CUDA_REGION_H

#include "device.h"
#include "pool.h"

/* What is known about an allocation. */
struct region_about {
	CUdeviceptr start;
	size_t bytes;		/* as asked for */
	uint64_t serial;
	struct device *device;
	CUcontext context;
	struct {		/* what holds it: other allocations may be there too */
		CUdeviceptr address;
		size_t bytes;
		uint64_t serial;
	} region;
};

/* Memory on `device` in the current context, charged. CUDA_ERROR_OUT_OF_MEMORY where the books or the
 * driver refuse it. `alignment`: 0 or a power of 2. Waits in the daemon: not inside the gate. */
CUresult region_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address);
/* CUDA_ERROR_INVALID_VALUE for an address that is not the start of one of ours (the caller then asks the driver). The
 * caller has made sure that nothing in flight uses it (cuMemFree waits; see memory.c). */
CUresult region_free(CUdeviceptr address);
/* One is bound once less (binding.h): what is behind one that was freed meanwhile is given back then. */
void region_unbind(struct region *region);

/* The allocation that holds `address`, as cuMemGetAddressRange tells it. */
bool region_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes, struct device **device);
bool region_about(CUdeviceptr address, struct region_about *about);
/* The program was given a descriptor of a range in one of ours (lent.h): false, nothing of ours is there. */
bool region_given(CUdeviceptr address, size_t bytes, int fd);
/* How many bytes from an address on are of the same memory to the driver; 0: none of ours is there. */
size_t region_piece(CUdeviceptr address);

#endif
