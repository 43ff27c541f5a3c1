// SPDX-License-Identifier: Apache-2.0
/*
 * What NVML says of memory, to a program that is under limits: the size that cuMemGetInfo has, too (sight.h), what is
 * free under the limits, and of processes no more than there is.
 *
 * The daemon is asked at each question, by a connection of its own: no GPU has to be managed for that, nor has the
 * program a context, or libcuda; so it is told of what holds now. GPUs are known by their UUID, as NVML's numbers are
 * not CUDA's.
 */

#include "monitor.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api.h"
#include "nvml.h"
#include "ours.h"
#include "sight.h"

/* Names of programs that tell others of GPUs, and are to say what is so: DCGM's, NVIDIA's own daemons. ggroupfs sets
 * the variable below. */
static const char *const watchers[] = {
	"nv-hostengine", "dcgmi", "dcgm-exporter", "nvidia-persistenced", "nvidia-fabricmanager", "nv-fabricmanager",
	"nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
};

/* The variable that says that NVML is to say what it does without us: 0. */
#define VARIABLE "GGROUP_NVML"

static bool is_watcher(void)
{
	char path[4096];
	const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
	const char *name;

	if (length <= 0)
		return false;
	path[length] = '\0';
	name = strrchr(path, '/');
	for (size_t i = 0; name && i < sizeof(watchers) / sizeof(watchers[0]); i++)
		if (!strcmp(name + 1, watchers[i]))
			return true;
	return false;
}

static bool left_alone(void)
{
	static int watcher;	/* atomically: 1 it is, 2 it is not */
	const char *said = getenv(VARIABLE);
	int known = __atomic_load_n(&watcher, __ATOMIC_RELAXED);

	if (!known) {
		known = is_watcher() ? 1 : 2;
		__atomic_store_n(&watcher, known, __ATOMIC_RELAXED);
	}
	return known == 1 || (said && !strcmp(said, "0"));
}

static int digit(char letter)
{
	if (letter >= '0' && letter <= '9')
		return letter - '0';
	letter |= 0x20;
	return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

/* "GPU-", and 16 bytes with hyphens among them. A slice of MIG has another name: of that nothing is known. */
static bool parse(const char *text, CUuuid *uuid)
{
	size_t bytes = 0;

	if (strncmp(text, "GPU-", 4))
		return false;
	for (text += 4; *text && bytes < sizeof(uuid->bytes); text++) {
		const int high = digit(text[0]), low = high < 0 ? -1 : digit(text[1]);

		if (*text == '-')
			continue;
		if (low < 0)
			return false;
		uuid->bytes[bytes++] = (char)(high << 4 | low);
		text++;
	}
	return bytes == sizeof(uuid->bytes) && !*text;
}

/* What is to be said of a device; false: what NVML says. */
static bool see(nvml_device device, struct sight *sight)
{
	char name[NVML_UUID_BYTES] = "";
	CUuuid uuid;
	int result;

	if (left_alone() || !nvml.nvmlDeviceGetUUID)
		return false;
	ours_enter();
	result = nvml.nvmlDeviceGetUUID(device, name, sizeof(name));
	ours_leave();
	name[sizeof(name) - 1] = '\0';
	return result == NVML_OK && parse(name, &uuid) && sight_view(&uuid, sight) &&
	       (sight->total != UINT64_MAX || sight->free != UINT64_MAX);
}

static unsigned long long least(unsigned long long one, unsigned long long other)
{
	return one < other ? one : other;
}

/* What is neither free, nor the program's to have, is reserved: by neighbours, and by limits above. */
static void show(const struct sight *sight, struct nvml_memory_v2 *memory)
{
	memory->total = least(memory->total, sight->total);
	memory->free = least(least(memory->free, sight->free), memory->total);
	if (sight->free != UINT64_MAX)
		memory->used = sight->used;
	memory->used = least(memory->used, memory->total - memory->free);
	memory->reserved = memory->total - memory->free - memory->used;
}

/* No process has more than there is, nor have all of them together, as the driver counts them, where other slices are
 * seen; the first of a list have theirs. */
static unsigned long long share(unsigned long long *used, unsigned long long left)
{
	if (*used == NVML_UNKNOWN)
		return left;
	*used = least(*used, left);
	return left - *used;
}

/* The first lines of every wrapper: what NVML calls of itself passes. */
#define REAL(result, name, arguments)			\
	do {						\
		if (!nvml_loaded() || !nvml.name)	\
			return NVML_FUNCTION_NOT_FOUND;	\
		if (ours_inside())			\
			return nvml.name arguments;	\
		ours_enter();				\
		(result) = nvml.name arguments;		\
		ours_leave();				\
	} while (0)

#define NVML_WRAPPER __attribute__((visibility("default"))) int

NVML_WRAPPER nvmlDeviceGetMemoryInfo(nvml_device device, struct nvml_memory *memory)
{
	struct nvml_memory_v2 found;
	struct sight sight;
	int result;

	REAL(result, nvmlDeviceGetMemoryInfo, (device, memory));
	if (result != NVML_OK || !memory || !see(device, &sight))
		return result;
	found = (struct nvml_memory_v2){ .total = memory->total, .free = memory->free, .used = memory->used };
	show(&sight, &found);
	*memory = (struct nvml_memory){ found.total, found.free, found.total - found.free };
	return result;
}

NVML_WRAPPER nvmlDeviceGetMemoryInfo_v2(nvml_device device, struct nvml_memory_v2 *memory)
{
	struct sight sight;
	int result;

	REAL(result, nvmlDeviceGetMemoryInfo_v2, (device, memory));
	if (result == NVML_OK && memory && see(device, &sight))
		show(&sight, memory);
	return result;
}

#define LISTING(name, type)								\
	NVML_WRAPPER name(nvml_device device, unsigned int *count, type *infos)	\
	{									\
		struct sight sight;						\
		unsigned long long left;					\
		int result;							\
										\
		REAL(result, name, (device, count, infos));			\
		if (result != NVML_OK || !count || !infos || !see(device, &sight))	\
			return result;						\
		left = sight.total;						\
		for (unsigned int i = 0; i < *count; i++)			\
			left = share(&infos[i].used, left);			\
		return result;							\
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

NVML_WRAPPER nvmlDeviceGetRunningProcessDetailList(nvml_device device, struct nvml_processes *list)
{
	struct sight sight;
	unsigned long long left;
	int result;

	REAL(result, nvmlDeviceGetRunningProcessDetailList, (device, list));
	if (result != NVML_OK || !list || !list->details || !see(device, &sight))
		return result;
	left = sight.total;
	for (unsigned int i = 0; i < list->count; i++)
		left = share(&list->details[i].used, left);
	return result;
}

/* The table, for hook.c. */

static const struct {
	const char *name;
	void *wrapper;
	size_t offset;		/* of NVML's pointer in struct nvml */
} rows[] = {
#define NVML(name, parameters, arguments) { #name, (void *)name, offsetof(struct nvml, name) },
#include "nvml.def"
#undef NVML
};
#define ROWS (sizeof(rows) / sizeof(rows[0]))

static void *pointer_of(size_t row)
{
	return *(void **)((char *)&nvml + rows[row].offset);
}

void *monitor_at(const void *pointer)
{
	for (size_t i = 0; pointer && nvml_opened() && i < ROWS; i++)
		if (pointer_of(i) == pointer)
			return rows[i].wrapper;
	return NULL;
}

void *monitor_exported(const char *name)
{
	for (size_t i = 0; i < ROWS; i++)
		if (!strcmp(rows[i].name, name))
			return rows[i].wrapper;
	return NULL;
}

void *monitor_wrapper(const char *name)
{
	for (size_t i = 0; i < ROWS; i++)
		if (!strcmp(rows[i].name, name))
			return nvml_loaded() && pointer_of(i) ? rows[i].wrapper : NULL;
	return NULL;
}
