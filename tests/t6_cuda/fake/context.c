// SPDX-License-Identifier: Apache-2.0
/* Devices and contexts. */

#include "internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 16
#define DEPTH 32

static struct { CUcontext context; unsigned int references; } primaries[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread CUcontext stack[DEPTH];
static __thread int depth;

/* Everything ever made is linked here, so that a check for leaks sees it as in use. */
struct object { struct object *next; };
static struct object *objects;

void *fake_object(size_t bytes, enum fake_kind kind)
{
	struct object *object = calloc(1, sizeof(*object) + 8 + bytes);
	enum fake_kind *made = (enum fake_kind *)((char *)object + 16);

	if (!object)
		fake_die("out of memory");
	object->next = __atomic_load_n(&objects, __ATOMIC_RELAXED);
	while (!__atomic_compare_exchange_n(&objects, &object->next, object, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
		;
	*made = kind;
	return made;
}

void fake_check(const void *handle, enum fake_kind kind, const char *what)
{
	enum fake_kind found;

	if (!handle)
		fake_die("%s: no handle", what);
	found = __atomic_load_n((const enum fake_kind *)handle, __ATOMIC_ACQUIRE);
	if (found == FAKE_DEAD)
		fake_die("%s: the handle was destroyed", what);
	if (found != kind)
		fake_die("%s: the handle is of another kind (%#x, not %#x)", what, found, kind);
}

int fake_devices(void)
{
	return (int)fake_number("FAKE_DEVICES", 1);
}

CUcontext fake_context(void)
{
	return depth ? stack[depth - 1] : NULL;
}

CUdevice fake_device_of(CUcontext context)
{
	fake_check(context, FAKE_CONTEXT, "fake_device_of");
	return context->device;
}

static bool no_device(CUdevice device)
{
	return device < 0 || device >= fake_devices();
}

static CUcontext make(CUdevice device, bool primary)
{
	CUcontext context = fake_object(sizeof(*context), FAKE_CONTEXT);

	context->device = device;
	context->primary = primary;
	return context;
}

static void destroy(CUcontext context)
{
	fake_end_streams(context);
	fake_memory_context_gone(context);
	__atomic_store_n(&context->kind, FAKE_DEAD, __ATOMIC_RELEASE);
}

FAKE_EXPORT cuDeviceGetCount(int *count)
{
	FAKE(cuDeviceGetCount);
	*count = fake_devices();
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDeviceGet(CUdevice *device, int ordinal)
{
	FAKE(cuDeviceGet);
	if (no_device(ordinal))
		return CUDA_ERROR_INVALID_DEVICE;
	*device = ordinal;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDeviceGetName(char *name, int length, CUdevice device)
{
	FAKE(cuDeviceGetName);
	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	snprintf(name, (size_t)length, "Fake GPU %d", device);
	return CUDA_SUCCESS;
}

/* A UUID is "FAKEFAKEFAKEFAK" and the number: both halves differ from 0, and the last byte is the number. */
/* Number of the GPU that is the first of this process: a restore may change it. */
static int moved_to;	/* accessed atomically */

__attribute__((visibility("default"))) void fake_move(int number)
{
	__atomic_store_n(&moved_to, number, __ATOMIC_SEQ_CST);
}

FAKE_EXPORT cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	FAKE(cuDeviceGetUuid_v2);
	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	memcpy(uuid->bytes, "FAKEFAKEFAKEFAK", 15);
	uuid->bytes[15] = (char)(device ? device : __atomic_load_n(&moved_to, __ATOMIC_SEQ_CST));
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
	return cuDeviceGetUuid_v2(uuid, device);
}

FAKE_EXPORT cuDeviceGetPCIBusId(char *name, int length, CUdevice device)
{
	FAKE(cuDeviceGetPCIBusId);
	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	snprintf(name, (size_t)length, "0000:%02x:00.0", device + 1);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
	FAKE(cuDeviceGetAttribute);
	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
		*value = 0;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value = 9;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
		*value = 0;
		break;
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
		*value = (int)fake_number("FAKE_VMM", 1);
		break;
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
		*value = (int)fake_number("FAKE_EXPORT", 1);
		break;
	case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
		*value = (int)fake_number("FAKE_CONCURRENT", 1);
		break;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
	case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
		*value = 1;
		break;
	default:
		*value = 0;
	}
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
	FAKE(cuDeviceCanAccessPeer);
	if (no_device(device) || no_device(peer))
		return CUDA_ERROR_INVALID_DEVICE;
	*can = device != peer;
	return CUDA_SUCCESS;
}

static CUresult create(CUcontext *context, CUdevice device)
{
	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	if (depth == DEPTH)
		fake_die("cuCtxCreate: the stack is full");
	*context = stack[depth++] = make(device, false);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
	FAKE(cuCtxCreate);
	(void)flags;
	return create(context, device);
}

FAKE_EXPORT cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
	FAKE(cuCtxCreate_v2);
	(void)flags;
	return create(context, device);
}

FAKE_EXPORT cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned int flags,
			   CUdevice device)
{
	FAKE(cuCtxCreate_v3);
	(void)params;
	(void)count;
	(void)flags;
	return create(context, device);
}

FAKE_EXPORT cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device)
{
	FAKE(cuCtxCreate_v4);
	(void)params;
	(void)flags;
	return create(context, device);
}

static CUresult destroy_own(CUcontext context)
{
	fake_check(context, FAKE_CONTEXT, "cuCtxDestroy");
	if (context->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth && stack[depth - 1] == context)
		depth--;
	destroy(context);
	return CUDA_SUCCESS;
}

#define DESTROY(name)					\
	FAKE_EXPORT name(CUcontext context)		\
	{						\
		FAKE(name);				\
		return destroy_own(context);		\
	}

DESTROY(cuCtxDestroy)
DESTROY(cuCtxDestroy_v2)
/* A context is attached as often as it was made: once. */
DESTROY(cuCtxDetach)

FAKE_EXPORT cuCtxGetApiVersion(CUcontext context, unsigned int *version)
{
	FAKE(cuCtxGetApiVersion);
	if (context->kind != FAKE_CONTEXT)
		return CUDA_ERROR_INVALID_CONTEXT;
	*version = 3020;
	return CUDA_SUCCESS;
}

CUcontext fake_primary_retain(CUdevice device)
{
	CUcontext context;

	pthread_mutex_lock(&lock);
	if (!primaries[device].references++)
		primaries[device].context = make(device, true);
	context = primaries[device].context;
	pthread_mutex_unlock(&lock);
	return context;
}

FAKE_EXPORT cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	FAKE(cuDevicePrimaryCtxRetain);
	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	*context = fake_primary_retain(device);
	return CUDA_SUCCESS;
}

static CUresult release(CUdevice device)
{
	CUcontext last = NULL;

	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	if (!primaries[device].references) {
		pthread_mutex_unlock(&lock);
		return CUDA_ERROR_INVALID_CONTEXT;
	}
	if (!--primaries[device].references)
		last = primaries[device].context;
	pthread_mutex_unlock(&lock);
	if (last)
		destroy(last);
	return CUDA_SUCCESS;
}

void fake_primary_release(CUdevice device)
{
	if (release(device))
		fake_die("a primary context is released more often than retained");
}

CUcontext fake_context_make(CUdevice device)
{
	return make(device, false);
}

void fake_context_destroy(CUcontext context)
{
	if (depth && stack[depth - 1] == context)
		depth--;
	destroy(context);
}

static CUresult reset(CUdevice device)
{
	CUcontext context;

	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	context = primaries[device].references ? primaries[device].context : NULL;
	primaries[device].references = 0;
	pthread_mutex_unlock(&lock);
	if (context)
		destroy(context);
	return CUDA_SUCCESS;
}

#define PRIMARY(name, act)			\
	FAKE_EXPORT name(CUdevice device)	\
	{					\
		FAKE(name);			\
		return act(device);		\
	}

PRIMARY(cuDevicePrimaryCtxRelease, release)
PRIMARY(cuDevicePrimaryCtxRelease_v2, release)
PRIMARY(cuDevicePrimaryCtxReset, reset)
PRIMARY(cuDevicePrimaryCtxReset_v2, reset)

FAKE_EXPORT cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	FAKE(cuDevicePrimaryCtxGetState);
	if (no_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	*flags = 0;
	*active = primaries[device].references != 0;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxGetCurrent(CUcontext *context)
{
	FAKE(cuCtxGetCurrent);
	*context = fake_context();
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxSetCurrent(CUcontext context)
{
	FAKE(cuCtxSetCurrent);
	if (context)
		fake_check(context, FAKE_CONTEXT, "cuCtxSetCurrent");
	if (depth)
		depth--;
	if (context)
		stack[depth++] = context;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxPushCurrent_v2(CUcontext context)
{
	FAKE(cuCtxPushCurrent_v2);
	fake_check(context, FAKE_CONTEXT, "cuCtxPushCurrent");
	if (depth == DEPTH)
		fake_die("cuCtxPushCurrent: the stack is full");
	stack[depth++] = context;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxPopCurrent_v2(CUcontext *context)
{
	FAKE(cuCtxPopCurrent_v2);
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	depth--;
	if (context)
		*context = stack[depth];
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxGetDevice(CUdevice *device)
{
	FAKE(cuCtxGetDevice);
	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	*device = fake_device_of(fake_context());
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxSynchronize(void)
{
	CUresult result;

	FAKE(cuCtxSynchronize);
	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	result = fake_unsafe();
	if (!result)
		fake_drain_context(fake_context());
	return result;
}

void fake_inject(void)
{
	const char *path = getenv("CUDA_INJECTION64_PATH");
	void *handle = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
	int (*initialise)(void);

	if (!handle)
		return;
	*(void **)&initialise = dlsym(handle, "InitializeInjection");
	if (!initialise || !initialise())
		fake_die("CUDA_INJECTION64_PATH: InitializeInjection of %s failed", path);
}
