// SPDX-License-Identifier: Apache-2.0
/*
 * A double of the part of libcuda.so.1 by which one process acts on others: checkpoints, and memory that is only
 * reserved. The machine is a file that all processes map, and processes.py reads and writes: GPUs, programs, and what
 * agents hold. It is as strict as the driver was seen to be: a call in the wrong state is ILLEGAL_STATE, an invalid
 * map is INVALID_VALUE, and a restore without room loses the program for good. What a process holds is freed with it.
 *
 * Environment: FAKE_MACHINE=path
 * FAKE_FAULTS=name:n:what[,...]  the nth call of `name` (1 is the first), where `what` is
 *     a number            answers that CUresult and does nothing
 *     before, after       the process is killed before or after the call has its effect
 *     hang                opens the FIFO FAKE_HANG, and goes on when the other end is closed
 *     grab0, grab1, ...   after the call, a neighbour takes all that is left of this GPU
 * FAKE_SPENT=directory    faults happen once: each leaves a file here, which keeps later processes from it
 */

#include <cuda.h>

#undef cuDeviceGetUuid
#undef cuDevicePrimaryCtxRelease

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default"))) CUresult
#define GPUS 4
#define PROGRAMS 4
#define HOLDS 64
#define LOG 4096
#define GRANULE (2ULL << 20)
#define CONTEXT (512ULL << 20)

/* As Machine in processes.py. */
struct machine {
	uint64_t size; /* of this struct */
	struct { uint8_t uuid[16]; char name[32]; uint64_t capacity, neighbours; } gpus[GPUS];
	struct { int32_t pid, state, gpu, busy; uint64_t bytes; } programs[PROGRAMS];
	struct { int32_t pid, gpu; uint64_t start, bytes; } holds[HOLDS]; /* including contexts; pid 0: free */
	uint64_t logged;
	char log[LOG]; /* "name\n" for each call that was about a program */
};

static struct machine *machine;
static int lock_file = -1;
static bool initialised;
static struct { char name[64]; unsigned int nth, calls; char what[16]; } faults[16];
static int fault_count;

static void die(const char *what)
{
	fprintf(stderr, "double of libcuda: %s: %s\n", what, strerror(errno));
	abort();
}

static void take(void)
{
	if (flock(lock_file, LOCK_EX))
		die("flock");
}

static void give(void)
{
	flock(lock_file, LOCK_UN);
}

static void setup(void)
{
	const char *path = getenv("FAKE_MACHINE"), *text = getenv("FAKE_FAULTS");
	char *copy = text ? strdup(text) : NULL, *save = NULL;

	lock_file = open(path ? path : "", O_RDWR | O_CLOEXEC);
	if (lock_file < 0)
		die("FAKE_MACHINE");
	machine = mmap(NULL, sizeof(*machine), PROT_READ | PROT_WRITE, MAP_SHARED, lock_file, 0);
	if (machine == MAP_FAILED || machine->size != sizeof(*machine))
		die("FAKE_MACHINE is another");
	for (char *item = copy ? strtok_r(copy, ",", &save) : NULL; item; item = strtok_r(NULL, ",", &save)) {
		if (sscanf(item, "%63[^:]:%u:%15s", faults[fault_count].name, &faults[fault_count].nth,
			   faults[fault_count].what) != 3 || fault_count == 15)
			die("FAKE_FAULTS");
		fault_count++;
	}
	free(copy);
}

/* Return whether this fault has not happened yet in any process. */
static bool fresh(int fault)
{
	const char *directory = getenv("FAKE_SPENT");
	char path[512];
	int fd;

	if (!directory)
		return true;
	snprintf(path, sizeof(path), "%s/%s.%u.%s", directory, faults[fault].name, faults[fault].nth,
		 faults[fault].what);
	fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return false;
	close(fd);
	return true;
}

static void hang(void)
{
	char byte;
	int fd = open(getenv("FAKE_HANG"), O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		die("FAKE_HANG");
	while (read(fd, &byte, 1) > 0)
		;
	close(fd);
}

static uint64_t start_of(int pid)
{
	char path[64], text[1024], *at;
	unsigned long long start = 0;
	ssize_t got;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	got = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (got <= 0)
		return 0;
	text[got] = 0;
	at = strrchr(text, ')');
	if (!at || at[2] == 'Z' || at[2] == 'X')
		return 0;
	sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &start);
	return start;
}

static uint64_t available(int gpu)
{
	uint64_t used = machine->gpus[gpu].neighbours;

	for (int i = 0; i < HOLDS; i++) {
		if (machine->holds[i].pid && start_of(machine->holds[i].pid) != machine->holds[i].start)
			machine->holds[i].pid = 0; /* the process has ended */
		if (machine->holds[i].pid && machine->holds[i].gpu == gpu)
			used += machine->holds[i].bytes;
	}
	for (int i = 0; i < PROGRAMS; i++)
		if (machine->programs[i].pid && machine->programs[i].gpu == gpu &&
		    machine->programs[i].state <= CU_PROCESS_STATE_LOCKED)
			used += machine->programs[i].bytes;
	return used > machine->gpus[gpu].capacity ? 0 : machine->gpus[gpu].capacity - used;
}

/* Reserve memory: return its index + 1, or 0 without room. */
static int hold(int gpu, uint64_t bytes)
{
	if (available(gpu) < bytes)
		return 0;
	for (int i = 0; i < HOLDS; i++) {
		if (machine->holds[i].pid)
			continue;
		machine->holds[i].pid = getpid();
		machine->holds[i].gpu = gpu;
		machine->holds[i].start = start_of(getpid());
		machine->holds[i].bytes = bytes;
		return i + 1;
	}
	die("too much is held");
	return 0;
}

/* Run a call: its fault, if any, its effect, and then the acts of others. */
static CUresult call(const char *name, CUresult (*effect)(void *), void *argument)
{
	int fault = -1;
	CUresult result;

	if (!machine)
		setup();
	for (int i = 0; i < fault_count; i++)
		if (!strcmp(faults[i].name, name) && ++faults[i].calls == faults[i].nth && fresh(i))
			fault = i;
	const char *what = fault < 0 ? "" : faults[fault].what;

	if (!strcmp(what, "before"))
		raise(SIGKILL);
	if (!strcmp(what, "hang"))
		hang();
	if (what[0] >= '0' && what[0] <= '9')
		return (CUresult)atoi(what);
	if (!initialised && strcmp(name, "cuInit"))
		return CUDA_ERROR_NOT_INITIALIZED;
	take();
	if (strstr(name, "Checkpoint") && machine->logged + strlen(name) + 1 < LOG)
		machine->logged += (uint64_t)sprintf(machine->log + machine->logged, "%s\n", name);
	result = effect(argument);
	if (!strncmp(what, "grab", 4))
		machine->gpus[atoi(what + 4)].neighbours += available(atoi(what + 4));
	give();
	if (!strcmp(what, "after"))
		raise(SIGKILL);
	return result;
}

static CUresult nothing(void *argument)
{
	(void)argument;
	return CUDA_SUCCESS;
}

EXPORT cuInit(unsigned int flags)
{
	CUresult result = flags ? CUDA_ERROR_INVALID_VALUE : call("cuInit", nothing, NULL);

	initialised = initialised || !result;
	return result;
}

EXPORT cuGetErrorName(CUresult error, const char **name)
{
	static const struct { CUresult code; const char *name; } known[] = {
		{ CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
		{ CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY" },
		{ CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED" },
		{ CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE" },
		{ CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY" },
		{ CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED" },
		{ CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN" },
	};

	for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
		if (known[i].code == error) {
			*name = known[i].name;
			return CUDA_SUCCESS;
		}
	*name = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

static CUresult count(void *argument)
{
	int gpus = 0;

	while (gpus < GPUS && machine->gpus[gpus].capacity)
		gpus++;
	*(int *)argument = gpus;
	return CUDA_SUCCESS;
}

EXPORT cuDeviceGetCount(int *found)
{
	return call("cuDeviceGetCount", count, found);
}

static bool no_gpu(int gpu)
{
	return gpu < 0 || gpu >= GPUS || !machine->gpus[gpu].capacity;
}

EXPORT cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult result = call("cuDeviceGet", nothing, NULL);

	*device = ordinal;
	return result ? result : no_gpu(ordinal) ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	CUresult result = call("cuDeviceGetUuid_v2", nothing, NULL);

	if (result || no_gpu(device))
		return result ? result : CUDA_ERROR_INVALID_DEVICE;
	memcpy(uuid->bytes, machine->gpus[device].uuid, 16);
	return CUDA_SUCCESS;
}

EXPORT cuDeviceGetName(char *name, int length, CUdevice device)
{
	CUresult result = call("cuDeviceGetName", nothing, NULL);

	if (result || no_gpu(device))
		return result ? result : CUDA_ERROR_INVALID_DEVICE;
	snprintf(name, (size_t)length, "%s", machine->gpus[device].name);
	return CUDA_SUCCESS;
}

/* Contexts and memory */

static int contexts[GPUS]; /* index + 1 of what each holds */
static int current = -1;

static CUresult retain(void *argument)
{
	int gpu = *(int *)argument;

	if (!contexts[gpu])
		contexts[gpu] = hold(gpu, CONTEXT);
	return contexts[gpu] ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	CUresult result = no_gpu(device) ? CUDA_ERROR_INVALID_DEVICE :
					   call("cuDevicePrimaryCtxRetain", retain, &device);

	*context = result ? NULL : (CUcontext)&contexts[device];
	return result;
}

EXPORT cuCtxSetCurrent(CUcontext context)
{
	CUresult result = call("cuCtxSetCurrent", nothing, NULL);

	if (!result)
		current = (int)((int *)context - contexts);
	return result;
}

EXPORT cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
				     CUmemAllocationGranularity_flags option)
{
	if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM)
		return CUDA_ERROR_INVALID_VALUE;
	*granularity = GRANULE;
	return call("cuMemGetAllocationGranularity", nothing, NULL);
}

struct creation { int gpu; uint64_t bytes; int made; };

static CUresult create(void *argument)
{
	struct creation *creation = argument;

	creation->made = hold(creation->gpu, creation->bytes);
	return creation->made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
		   unsigned long long flags)
{
	struct creation creation = { prop->location.id, size, 0 };
	CUresult result;

	if (flags || !size || size % GRANULE || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
	    prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || no_gpu(creation.gpu) || prop->requestedHandleTypes ||
	    prop->win32HandleMetaData || prop->allocFlags.compressionType || prop->allocFlags.usage)
		return CUDA_ERROR_INVALID_VALUE;
	if (current < 0)	/* a context of any GPU will do (measured on two H200s) */
		return CUDA_ERROR_INVALID_CONTEXT;
	result = call("cuMemCreate", create, &creation);
	*handle = result ? 0 : (CUmemGenericAllocationHandle)creation.made;
	return result;
}

static CUresult release(void *argument)
{
	const uint64_t handle = *(uint64_t *)argument;

	if (!handle || handle > HOLDS || machine->holds[handle - 1].pid != getpid())
		return CUDA_ERROR_INVALID_VALUE;
	machine->holds[handle - 1].pid = 0;
	return CUDA_SUCCESS;
}

EXPORT cuMemRelease(CUmemGenericAllocationHandle handle)
{
	uint64_t number = handle;

	return call("cuMemRelease", release, &number);
}

/* Other processes */

struct operation {
	int pid, from, to; /* states before and after */
	bool locks;
	const CUcheckpointRestoreArgs *map;
	CUprocessState *state;
};

static bool all_zero(const void *bytes, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (((const char *)bytes)[i])
			return false;
	return true;
}

static int gpu_of(const CUuuid *uuid)
{
	for (int gpu = 0; gpu < GPUS; gpu++)
		if (!no_gpu(gpu) && !memcmp(machine->gpus[gpu].uuid, uuid->bytes, 16))
			return gpu;
	return -1;
}

/* Return where the map sends programs of `place`; -1 unless it maps all GPUs, each to one of its kind. */
static int mapped(const CUcheckpointRestoreArgs *map, int place)
{
	unsigned int old = 0, new = 0;
	int gpus, to = -1;

	count(&gpus);
	if (!all_zero(map->reserved, sizeof(map->reserved)) || map->reserved1 ||
	    map->gpuPairsCount != (unsigned int)gpus)
		return -1;
	for (int i = 0; i < gpus; i++) {
		int a = gpu_of(&map->gpuPairs[i].oldUuid), b = gpu_of(&map->gpuPairs[i].newUuid);

		if (a < 0 || b < 0 || strcmp(machine->gpus[a].name, machine->gpus[b].name))
			return -1;
		old |= 1u << a;
		new |= 1u << b;
		if (a == place)
			to = b;
	}
	return old == new && old == (1u << gpus) - 1 ? to : -1;
}

static CUresult operate(void *argument)
{
	struct operation *operation = argument;
	int at = 0;

	while (at < PROGRAMS && machine->programs[at].pid != operation->pid)
		at++;
	if (!operation->pid || at == PROGRAMS)
		return CUDA_ERROR_INVALID_VALUE;
	if (operation->state) {
		*operation->state = (CUprocessState)machine->programs[at].state;
		return CUDA_SUCCESS;
	}
	if (machine->programs[at].state != operation->from)
		return CUDA_ERROR_ILLEGAL_STATE;
	if (operation->locks && machine->programs[at].busy)
		return CUDA_ERROR_NOT_READY;
	if (operation->from == CU_PROCESS_STATE_CHECKPOINTED) {
		int gpu = operation->map ? mapped(operation->map, machine->programs[at].gpu) :
					   machine->programs[at].gpu;

		if (gpu < 0)
			return CUDA_ERROR_INVALID_VALUE;
		if (available(gpu) < machine->programs[at].bytes) {
			machine->programs[at].state = CU_PROCESS_STATE_FAILED;
			return CUDA_ERROR_UNKNOWN;
		}
		machine->programs[at].gpu = gpu;
	}
	machine->programs[at].state = operation->to;
	return CUDA_SUCCESS;
}

EXPORT cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
	return call("cuCheckpointProcessGetState", operate, &(struct operation){ .pid = pid, .state = state });
}

EXPORT cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
	if (!args || !args->timeoutMs || args->reserved0 || !all_zero(args->reserved1, sizeof(args->reserved1)))
		return CUDA_ERROR_INVALID_VALUE; /* the driver allows it, but no caller should wait for ever */
	return call("cuCheckpointProcessLock", operate,
		    &(struct operation){ pid, CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED, true, NULL, NULL });
}

EXPORT cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
	if (args)
		return CUDA_ERROR_INVALID_VALUE;
	return call("cuCheckpointProcessCheckpoint", operate,
		    &(struct operation){ pid, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED, false, NULL,
					 NULL });
}

EXPORT cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
	return call("cuCheckpointProcessRestore", operate,
		    &(struct operation){ pid, CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED, false, args,
					 NULL });
}

EXPORT cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
	if (args)
		return CUDA_ERROR_INVALID_VALUE;
	return call("cuCheckpointProcessUnlock", operate,
		    &(struct operation){ pid, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING, false, NULL, NULL });
}
