/* NO_LINK: as nvidia-smi does, which opens NVML itself, and is no CUDA program. */
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * monitor WAY: what NVML says of memory, by its entry points as they are found in one way: handle, default, or (in
 * monitor_linked) linked. It says so as often as it is asked to. monitor absent: whether there are any before.
 */
#include <dlfcn.h>
#include <sys/wait.h>

#include "common.h"
#include "nvml.h"

#ifdef LINKED
int nvmlInit_v2(void);
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvml_device *device);
int nvmlDeviceGetUUID(nvml_device device, char *uuid, unsigned int length);
#define NVML(name, parameters, arguments) int name parameters;
#include "nvml.def"
#undef NVML
#endif

static struct nvml found;
static int (*init)(void);
static int (*by_index)(unsigned int index, nvml_device *device);

static void find(const char *way)
{
#ifdef LINKED
	(void)way;
	init = nvmlInit_v2;
	by_index = nvmlDeviceGetHandleByIndex_v2;
#define NVML(name, parameters, arguments) found.name = name;
#else
	void *handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | (strcmp(way, "default") ? 0 : RTLD_GLOBAL));
	void *from = strcmp(way, "default") ? handle : RTLD_DEFAULT;

	CHECK(handle);
	*(void **)&init = dlsym(handle, "nvmlInit_v2");
	*(void **)&by_index = dlsym(handle, "nvmlDeviceGetHandleByIndex_v2");
#define NVML(name, parameters, arguments) CHECK((*(void **)&found.name = dlsym(from, #name)));
#endif
#include "nvml.def"
#undef NVML
}

static uint64_t sum(unsigned int count, const unsigned long long *used, size_t stride)
{
	uint64_t all = 0;

	for (unsigned int i = 0; i < count; i++) {
		const unsigned long long one = *(const unsigned long long *)((const char *)used + i * stride);

		all += one == NVML_UNKNOWN ? 0 : one;
	}
	return all;
}

#define SUM(name, type)								\
	do {										\
		type infos[16];								\
		unsigned int count = 16;						\
											\
		CHECK(found.name(device, &count, infos) == NVML_OK);			\
		CHECK(sum(count, &infos[0].used, sizeof(infos[0])) == all);		\
	} while (0)

static void lists(nvml_device device)
{
	struct nvml_detail details[16];
	struct nvml_processes list = { .count = 16, .details = details };
	unsigned int none = 0;
	uint64_t all;

	CHECK(found.nvmlDeviceGetRunningProcessDetailList(device, &list) == NVML_OK);
	all = sum(list.count, &details[0].used, sizeof(details[0]));
	SUM(nvmlDeviceGetComputeRunningProcesses, struct nvml_process_v1);
	SUM(nvmlDeviceGetComputeRunningProcesses_v2, struct nvml_process);
	SUM(nvmlDeviceGetComputeRunningProcesses_v3, struct nvml_process);
	SUM(nvmlDeviceGetGraphicsRunningProcesses, struct nvml_process_v1);
	SUM(nvmlDeviceGetGraphicsRunningProcesses_v2, struct nvml_process);
	SUM(nvmlDeviceGetGraphicsRunningProcesses_v3, struct nvml_process);
	SUM(nvmlDeviceGetMPSComputeRunningProcesses, struct nvml_process_v1);
	SUM(nvmlDeviceGetMPSComputeRunningProcesses_v2, struct nvml_process);
	SUM(nvmlDeviceGetMPSComputeRunningProcesses_v3, struct nvml_process);
	tell("sum", all >> 20);
	/* How long a list is, is asked for first. */
	CHECK(!list.count || found.nvmlDeviceGetComputeRunningProcesses_v3(device, &none, NULL) == 7);
	CHECK(!list.count || none == list.count);
}

static void amounts(nvml_device device)
{
	struct nvml_memory_v2 memory = { .version = sizeof(memory) | 2 << 24 }, wrong = { .version = 1 };
	struct nvml_memory first;

	CHECK(found.nvmlDeviceGetMemoryInfo_v2(device, &memory) == NVML_OK);
	CHECK(found.nvmlDeviceGetMemoryInfo(device, &first) == NVML_OK);
	CHECK(first.total == memory.total && first.free == memory.free && first.used == memory.total - memory.free);
	CHECK(memory.total == memory.free + memory.used + memory.reserved);
	CHECK(found.nvmlDeviceGetMemoryInfo_v2(device, &wrong) == 2);	/* NVML's own answers reach the program */
	CHECK(found.nvmlDeviceGetMemoryInfo_v2(NULL, &memory) == 2);
	tell("total", memory.total >> 20);
	tell("free", memory.free >> 20);
	tell("used", memory.used >> 20);
}

static void look(const char *way, unsigned int index)
{
	nvml_device device;

	find(way);
	CHECK(init() == NVML_OK);
	CHECK(by_index(index, &device) == NVML_OK);
	for (;;) {
		amounts(device);
		lists(device);
	}
}

int main(int argc, char **argv)
{
	const char *way = argc > 1 ? argv[1] : "linked";
	const unsigned int index = argc > 2 ? (unsigned int)atoi(argv[2]) : 0;
	int status;
	pid_t child;

#ifndef LINKED
	/* Until the program has loaded NVML there is none. */
	CHECK(!dlsym(RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo") && dlerror());
#endif
	if (!strcmp(way, "fork")) {
		find(way);
		child = fork();
		if (!child)
			look(way, index);
		CHECK(waitpid(child, &status, 0) == child);
		return !WIFEXITED(status);
	}
	look(way, index);
	return 0;
}
