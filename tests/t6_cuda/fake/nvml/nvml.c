// SPDX-License-Identifier: Apache-2.0
/*
 * A double of libnvidia-ml.so.1, as far as it tells of memory: GPUs with the UUIDs of the double of libcuda.
 *
 * FAKE_DEVICES     how many there are (1)
 * FAKE_MEMORY      bytes that each has (1 GiB)
 * FAKE_USED        bytes of that which processes hold (256 MiB), and as much as a quarter of it the driver itself
 * FAKE_HOLD        "pid:bytes,pid:bytes": processes, and what each holds; no bytes: the driver does not say
 * FAKE_NAME        the UUID, in the place of that
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"

#define EXPORT __attribute__((visibility("default"))) int
#define INVALID 2
#define INSUFFICIENT_SIZE 7
#define PROCESSES 16

static uint64_t number(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 0) : otherwise;
}

EXPORT nvmlInit_v2(void)
{
	return NVML_OK;
}

EXPORT nvmlDeviceGetCount_v2(unsigned int *count)
{
	*count = (unsigned int)number("FAKE_DEVICES", 1);
	return NVML_OK;
}

EXPORT nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvml_device *device)
{
	if (index >= number("FAKE_DEVICES", 1))
		return INVALID;
	*device = (nvml_device)(uintptr_t)(index + 1);
	return NVML_OK;
}

EXPORT nvmlDeviceGetUUID(nvml_device device, char *uuid, unsigned int length)
{
	const char *name = getenv("FAKE_NAME");

	if (name)
		snprintf(uuid, length, "%s", name);
	else
		snprintf(uuid, length, "GPU-46414b45-4641-4b45-4641-4b4546414b%02x",
			 (unsigned int)(uintptr_t)device - 1);
	return NVML_OK;
}

EXPORT nvmlDeviceGetMemoryInfo_v2(nvml_device device, struct nvml_memory_v2 *memory)
{
	const uint64_t used = number("FAKE_USED", 256 << 20);

	if (!device || memory->version != (sizeof(*memory) | 2 << 24))
		return INVALID;
	memory->total = number("FAKE_MEMORY", 1 << 30);
	memory->reserved = used / 4;
	memory->used = used;
	memory->free = memory->total - memory->used - memory->reserved;
	return NVML_OK;
}

/* By its own entry point, as a library does that is not made with -Bsymbolic. */
EXPORT nvmlDeviceGetMemoryInfo(nvml_device device, struct nvml_memory *memory)
{
	struct nvml_memory_v2 found = { .version = sizeof(found) | 2 << 24 };
	const int result = nvmlDeviceGetMemoryInfo_v2(device, &found);

	*memory = (struct nvml_memory){ found.total, found.free, found.used + found.reserved };
	return result;
}

struct held {
	unsigned int pid;
	unsigned long long used;
};

static unsigned int all(struct held *held)
{
	const char *text = getenv("FAKE_HOLD");
	unsigned int count = 0;
	char *end;

	while (text && *text && count < PROCESSES) {
		held[count].pid = (unsigned int)strtoul(text, &end, 10);
		held[count].used = *end == ':' ? strtoull(end + 1, &end, 0) : NVML_UNKNOWN;
		count++;
		text = *end ? end + 1 : end;
	}
	return count;
}

#define LISTING(name, type)								\
	EXPORT name(nvml_device device, unsigned int *count, type *infos)		\
	{									\
		struct held held[PROCESSES];					\
		const unsigned int there = all(held), room = *count;		\
										\
		if (!device)							\
			return INVALID;						\
		*count = there;							\
		if (there > room)						\
			return INSUFFICIENT_SIZE;				\
		for (unsigned int i = 0; i < there; i++)			\
			infos[i] = (type){ .pid = held[i].pid, .used = held[i].used };	\
		return NVML_OK;							\
	}

LISTING(nvmlDeviceGetComputeRunningProcesses, struct nvml_process_v1)
LISTING(nvmlDeviceGetComputeRunningProcesses_v2, struct nvml_process)
LISTING(nvmlDeviceGetComputeRunningProcesses_v3, struct nvml_process)
LISTING(nvmlDeviceGetGraphicsRunningProcesses, struct nvml_process_v1)
LISTING(nvmlDeviceGetGraphicsRunningProcesses_v2, struct nvml_process)
LISTING(nvmlDeviceGetGraphicsRunningProcesses_v3, struct nvml_process)
LISTING(nvmlDeviceGetMPSComputeRunningProcesses, struct nvml_process_v1)
LISTING(nvmlDeviceGetMPSComputeRunningProcesses_v2, struct nvml_process)
LISTING(nvmlDeviceGetMPSComputeRunningProcesses_v3, struct nvml_process)

EXPORT nvmlDeviceGetRunningProcessDetailList(nvml_device device, struct nvml_processes *list)
{
	struct held held[PROCESSES];
	const unsigned int there = all(held), room = list->count;

	if (!device)
		return INVALID;
	list->count = there;
	if (there > room || !list->details)
		return INSUFFICIENT_SIZE;
	for (unsigned int i = 0; i < there; i++)
		list->details[i] = (struct nvml_detail){ .pid = held[i].pid, .used = held[i].used };
	return NVML_OK;
}
