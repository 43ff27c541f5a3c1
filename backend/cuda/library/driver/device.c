// SPDX-License-Identifier: Apache-2.0

#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "life.h"
#include "log.h"
#include "ours.h"

/* The listening thread sees a device as soon as it is made, the program's threads once it is set up. */
static struct device *devices[GG_ORDINALS];	/* atomically; never freed */
static bool set_up[GG_ORDINALS];			/* atomically; written under setup_lock */
unsigned int device_number;
static pthread_mutex_t setup_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t ending = PTHREAD_MUTEX_INITIALIZER; /* from device_context_ends to device_context_ended */

/* The device of a context, needed on every launch: each thread keeps its last answer, until a context ends. */
static uint64_t epoch = 1;	/* atomically */
static __thread struct {
	CUcontext context;
	struct device *device;
	uint64_t epoch;
} known;

static int attribute(CUdevice ordinal, CUdevice_attribute which)
{
	int value = 0;

	if (!real.cuDeviceGetAttribute || real.cuDeviceGetAttribute(&value, which, ordinal))
		return 0;
	return value;
}

bool device_uuid(CUdevice ordinal, CUuuid *uuid)
{
	/* _v2 differs only for a MIG slice: it gives the slice's UUID, not that of the GPU. */
	if (real.cuDeviceGetUuid_v2 && !real.cuDeviceGetUuid_v2(uuid, ordinal))
		return true;
	return real.cuDeviceGetUuid && !real.cuDeviceGetUuid(uuid, ordinal);
}

bool device_identify(struct device *device)
{
	const CUuuid before = device->uuid;

	if (!device_uuid(device->ordinal, &device->uuid))
		log_line("device %d: no UUID", device->ordinal);
	device->host_node = attribute(device->ordinal, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
	if (device->host_node < 0)
		device->host_node = 0;
	return memcmp(&before, &device->uuid, sizeof(before)) != 0;
}

static struct device *make(CUdevice ordinal)
{
	struct device *device = calloc(1, sizeof(*device));

	if (!device)
		return NULL;
	device->ordinal = ordinal;
	device->index = -1;
	pthread_rwlock_init(&device->in_use, NULL);
	device_identify(device);
	device->elastic = attribute(ordinal, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
	return device;
}

static void set_up_parts(struct device *device)
{
	const CUresult result = device->elastic ? life_set_up(device) : CUDA_SUCCESS;

	if (result) {
		log_line("device %d: nothing can be moved, error %d", device->ordinal, (int)result);
		device->elastic = false;
	}
}

/* Set up a device at its first use, in the thread whose context is current, if there is one. Other threads wait: MANAGE
 * is the arrival in the tree, and a frozen slice holds a newcomer there. */
static struct device *set_up_device(CUdevice ordinal, CUcontext context)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	struct device *device;

	pthread_mutex_lock(&setup_lock);
	device = __atomic_load_n(&devices[ordinal], __ATOMIC_ACQUIRE);
	if (set_up[ordinal]) {
		pthread_mutex_unlock(&setup_lock);
		return device;
	}
	ours_enter();
	real.cuThreadExchangeStreamCaptureMode(&mode);
	device = make(ordinal);
	if (device) {
		device->primary = context;
		device->contexts = context ? 1 : 0;
		set_up_parts(device);
		__atomic_store_n(&devices[ordinal], device, __ATOMIC_RELEASE);
		life_known(device);
		log_line("device %d: %s, ggroupfs's gpu %d", ordinal,
			 device->elastic ? "elastic" : "not elastic",
			 __atomic_load_n(&device->index, __ATOMIC_RELAXED));
		__atomic_add_fetch(&device_number, 1, __ATOMIC_ACQ_REL);
		__atomic_store_n(&set_up[ordinal], true, __ATOMIC_RELEASE);
	}
	real.cuThreadExchangeStreamCaptureMode(&mode);
	ours_leave();
	pthread_mutex_unlock(&setup_lock);
	return device;
}

bool device_keep_all(void)
{
	return !pthread_mutex_trylock(&setup_lock);
}

void device_let_all(void)
{
	pthread_mutex_unlock(&setup_lock);
}

/* Take `context` for a device whose former one was destroyed, as one is needed. */
static void adopt(struct device *device, CUcontext context)
{
	pthread_rwlock_wrlock(&device->in_use);
	if (!device->primary) {
		__atomic_store_n(&device->primary, context, __ATOMIC_RELEASE);
		device->contexts++;
	}
	pthread_rwlock_unlock(&device->in_use);
}

static struct device *device_with(CUdevice ordinal, CUcontext context)
{
	struct device *device;

	if (ordinal < 0 || ordinal >= GG_ORDINALS)
		return NULL;
	if (!__atomic_load_n(&set_up[ordinal], __ATOMIC_ACQUIRE))
		return context ? set_up_device(ordinal, context) : NULL;
	device = __atomic_load_n(&devices[ordinal], __ATOMIC_ACQUIRE);
	if (context && !__atomic_load_n(&device->primary, __ATOMIC_ACQUIRE))
		adopt(device, context);
	return device;
}

struct device *device_current(void)
{
	uint64_t now = __atomic_load_n(&epoch, __ATOMIC_ACQUIRE);
	CUcontext context = NULL;
	CUdevice ordinal;

	if (!real.cuCtxGetCurrent || real.cuCtxGetCurrent(&context) || !context)
		return NULL;
	if (known.context == context && known.epoch == now)
		return known.device;
	if (real.cuCtxGetDevice(&ordinal))
		return NULL;
	known.device = device_with(ordinal, context);
	if (known.device)	/* its work is waited for */
		life_context_used(known.device, context);
	known.context = known.device ? context : NULL;
	known.epoch = now;
	return known.device;
}

CUcontext device_context(void)
{
	return known.context;
}

/* Return the current context, if it is one of `ordinal`. */
static CUcontext context_on(CUdevice ordinal)
{
	CUcontext context = NULL;
	CUdevice current;

	if (real.cuCtxGetCurrent && !real.cuCtxGetCurrent(&context) && context &&
	    (real.cuCtxGetDevice(&current) || current != ordinal))
		context = NULL;
	return context;
}

struct device *device_of(CUdevice ordinal)
{
	return device_with(ordinal, context_on(ordinal));
}

struct device *device_for_memory(CUdevice ordinal)
{
	struct device *device = device_of(ordinal);
	int count = 0;

	if (device || ordinal < 0 || ordinal >= GG_ORDINALS)
		return device;
	/* For a program that was not initialised, or names a GPU that does not exist, the driver reports the error. */
	if (!real.cuDeviceGetCount || real.cuDeviceGetCount(&count) || ordinal >= count)
		return NULL;
	return set_up_device(ordinal, NULL);
}

void device_each(void (*visit)(struct device *, void *), void *argument)
{
	for (int i = 0; i < GG_ORDINALS; i++) {
		struct device *device = __atomic_load_n(&devices[i], __ATOMIC_ACQUIRE);

		if (device)
			visit(device, argument);
	}
}

bool device_borrow(struct device *device)
{
	if (pthread_rwlock_tryrdlock(&device->in_use))
		return false;
	if (device->primary && !real.cuCtxPushCurrent_v2(device->primary))
		return true;
	pthread_rwlock_unlock(&device->in_use);
	return false;
}

void device_return(struct device *device)
{
	CUcontext context;

	real.cuCtxPopCurrent_v2(&context);
	pthread_rwlock_unlock(&device->in_use);
}

/* Two threads may destroy contexts at once; the set of held devices must not change in between. */
static uint64_t held;	/* one bit per ordinal; under `ending` */
static CUcontext ends;	/* the context that is being destroyed; atomically */

void device_context_ends(CUcontext context)
{
	pthread_mutex_lock(&ending);
	__atomic_store_n(&ends, context, __ATOMIC_SEQ_CST);
	held = 0;
	for (int i = 0; i < GG_ORDINALS; i++) {
		struct device *device = __atomic_load_n(&devices[i], __ATOMIC_ACQUIRE);

		if (!device || __atomic_load_n(&device->primary, __ATOMIC_ACQUIRE) != context)
			continue;
		pthread_rwlock_wrlock(&device->in_use);
		held |= UINT64_C(1) << i;
	}
}

void device_context_forgotten(CUcontext context)
{
	for (int i = 0; i < GG_ORDINALS; i++)
		if (held >> i & 1 && devices[i]->primary == context)
			__atomic_store_n(&devices[i]->primary, NULL, __ATOMIC_RELEASE);
}

void device_context_ended(bool gone)
{
	for (int i = 0; i < GG_ORDINALS; i++) {
		struct device *device = __atomic_load_n(&devices[i], __ATOMIC_ACQUIRE);

		if (!(held >> i & 1))
			continue;
		pthread_rwlock_unlock(&device->in_use);
	}
	if (gone)
		__atomic_add_fetch(&epoch, 1, __ATOMIC_ACQ_REL);
	__atomic_store_n(&ends, NULL, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&ending);
}

void device_context_made(CUcontext context)
{
	if (!context || __atomic_load_n(&ends, __ATOMIC_SEQ_CST) != context)
		return;
	pthread_mutex_lock(&ending);
	pthread_mutex_unlock(&ending);
}

void device_forget(void)
{
	setup_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	ending = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	ends = NULL;
	device_number = 0;
	for (int i = 0; i < GG_ORDINALS; i++) {
		devices[i] = NULL;
		set_up[i] = false;
	}
	epoch++;
}
