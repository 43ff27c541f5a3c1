// SPDX-License-Identifier: Apache-2.0
/* The library's life: what is set up when, what each GPU has, and what a child of fork() must not believe. */

#include "state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "counters.h"
#include "daemon.h"
#include "departure.h"
#include "driver.h"
#include "exchange.h"
#include "gate.h"
#include "graph.h"
#include "heat.h"
#include "home.h"
#include "stream.h"
#include "mover.h"

bool state_ready;
__thread unsigned int state_depth;

/* Seen by the listening thread as soon as it is made, by the program's threads once it is set up. */
static struct device *devices[GG_ORDINALS];	/* atomically; never freed */
static bool set_up[GG_ORDINALS];			/* atomically; written under setup_lock */
static pthread_mutex_t setup_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t ending = PTHREAD_MUTEX_INITIALIZER; /* from state_context_ends to state_context_ended */
static bool daemon_begun;	/* under setup_lock */

/* Of which device a context is: asked for on every launch, so each thread keeps its last answer, until a
 * context ends. */
static uint64_t epoch = 1;	/* atomically */
static __thread struct {
	CUcontext context;
	struct device *device;
	uint64_t epoch;
} known;

uint64_t state_now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

void state_log(const char *format, ...)
{
	char line[512];
	va_list arguments;
	int used;

	if (!getenv("GGROUP_CUDA_LOG"))
		return;
	used = snprintf(line, sizeof(line), "ggroup-cuda[%d]: ", (int)getpid());
	va_start(arguments, format);
	used += vsnprintf(line + used, sizeof(line) - (size_t)used - 1, format, arguments);
	va_end(arguments);
	if (used > (int)sizeof(line) - 2)
		used = sizeof(line) - 2;
	line[used++] = '\n';
	/* One write(2): lines of several threads and processes do not mix. */
	if (write(STDERR_FILENO, line, (size_t)used) < 0)
		return;
}

/* Runs in the one thread that a child of fork() has. Locks may have been held by threads that it does not have. */
static void in_child(void)
{
	driver_forget();
	state_depth = 0;
	if (!state_ready)	/* nothing was used yet: a shell, say, forks all the time */
		return;
	setup_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	ending = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	daemon_begun = false;
	for (int i = 0; i < GG_ORDINALS; i++) {
		devices[i] = NULL;
		set_up[i] = false;
	}
	epoch++;
	gate_forget();
	stream_forget();
	graph_forget();
	counters_forget();
	heat_forget();
	exchange_forget();
	departure_forget();
	home_forget();
	memory_forget();
	daemon_forget();
	state_ready = false;
}

/* At once and not at the first call: one thread may fork while another makes that. */
__attribute__((constructor)) static void look_for_children(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

void state_begin_slowly(void)
{
	/* A constructor of libcuda, or of what it loads, may call an entry point: that call passes. */
	if (state_inside())
		return;
	state_enter();
	driver_open();
	__atomic_store_n(&state_ready, true, __ATOMIC_RELEASE);
	state_leave();
}

static int attribute(CUdevice ordinal, CUdevice_attribute which)
{
	int value = 0;

	if (!real.cuDeviceGetAttribute || real.cuDeviceGetAttribute(&value, which, ordinal))
		return 0;
	return value;
}

bool state_identify(struct device *device)
{
	const CUuuid before = device->uuid;

	/* _v2 differs for a MIG slice only: its own UUID, not that of the GPU it is part of. */
	if (!real.cuDeviceGetUuid_v2 || real.cuDeviceGetUuid_v2(&device->uuid, device->ordinal))
		if (!real.cuDeviceGetUuid || real.cuDeviceGetUuid(&device->uuid, device->ordinal))
			state_log("device %d: no UUID", device->ordinal);
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
	state_identify(device);
	device->elastic = attribute(ordinal, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
	return device;
}

static void set_up_memory(struct device *device)
{
	CUresult result = CUDA_SUCCESS;

	if (device->elastic)
		result = pool_setup(device);
	if (device->elastic && !result)
		result = region_setup(device);
	if (device->elastic && !result)
		result = mover_setup(device);
	if (result) {
		state_log("device %d: nothing can be moved, error %d", device->ordinal, (int)result);
		device->elastic = false;
	}
}

/* The first use of a device, by the thread whose context is current. Others wait for it: MANAGE is the arrival in the
 * tree, and a frozen slice holds a newcomer there. */
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
	state_enter();
	real.cuThreadExchangeStreamCaptureMode(&mode);
	device = make(ordinal);
	if (device) {
		device->primary = context;
		device->contexts = 1;
		set_up_memory(device);
		__atomic_store_n(&devices[ordinal], device, __ATOMIC_RELEASE);
		if (!daemon_begun)
			daemon_begin();
		daemon_begun = true;
		daemon_manage(device);
		state_log("device %d: %s, ggroupfs's gpu %d", ordinal,
			  device->elastic ? "elastic" : "not elastic", device->index);
		__atomic_store_n(&set_up[ordinal], true, __ATOMIC_RELEASE);
	}
	real.cuThreadExchangeStreamCaptureMode(&mode);
	state_leave();
	pthread_mutex_unlock(&setup_lock);
	return device;
}

bool state_keep_devices(void)
{
	return !pthread_mutex_trylock(&setup_lock);
}

void state_let_devices(void)
{
	pthread_mutex_unlock(&setup_lock);
}

/* A context is needed, and the one that was used has been destroyed: take this. */
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
	if (!__atomic_load_n(&set_up[ordinal], __ATOMIC_ACQUIRE)) {
		/* Without a context there is nothing to set up in. */
		return context ? set_up_device(ordinal, context) : NULL;
	}
	device = __atomic_load_n(&devices[ordinal], __ATOMIC_ACQUIRE);
	if (context && !__atomic_load_n(&device->primary, __ATOMIC_ACQUIRE))
		adopt(device, context);
	return device;
}

struct device *state_current_device(void)
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
	if (known.device)	/* what it runs is waited for */
		mover_context(known.device, context);
	known.context = known.device ? context : NULL;
	known.epoch = now;
	return known.device;
}

struct device *state_device(CUdevice ordinal)
{
	CUcontext context = NULL;
	CUdevice current;

	if (real.cuCtxGetCurrent && !real.cuCtxGetCurrent(&context) && context &&
	    (real.cuCtxGetDevice(&current) || current != ordinal))
		context = NULL;
	return device_with(ordinal, context);
}

void state_devices(void (*visit)(struct device *, void *), void *argument)
{
	for (int i = 0; i < GG_ORDINALS; i++) {
		struct device *device = __atomic_load_n(&devices[i], __ATOMIC_ACQUIRE);

		if (device)
			visit(device, argument);
	}
}

bool state_borrow(struct device *device)
{
	if (pthread_rwlock_tryrdlock(&device->in_use))
		return false;
	if (device->primary && !real.cuCtxPushCurrent_v2(device->primary))
		return true;
	pthread_rwlock_unlock(&device->in_use);
	return false;
}

void state_return(struct device *device)
{
	CUcontext context;

	real.cuCtxPopCurrent_v2(&context);
	pthread_rwlock_unlock(&device->in_use);
}

/* Two threads may destroy contexts at once; which devices are held must not change in between. */
static uint64_t held;	/* a bit an ordinal; under `ending` */

void state_context_ends(CUcontext context)
{
	pthread_mutex_lock(&ending);
	held = 0;
	for (int i = 0; i < GG_ORDINALS; i++) {
		struct device *device = __atomic_load_n(&devices[i], __ATOMIC_ACQUIRE);

		if (!device || __atomic_load_n(&device->primary, __ATOMIC_ACQUIRE) != context)
			continue;
		pthread_rwlock_wrlock(&device->in_use);
		held |= UINT64_C(1) << i;
	}
}

void state_context_forgotten(CUcontext context)
{
	for (int i = 0; i < GG_ORDINALS; i++)
		if (held >> i & 1 && devices[i]->primary == context)
			__atomic_store_n(&devices[i]->primary, NULL, __ATOMIC_RELEASE);
}

void state_context_ended(bool gone)
{
	for (int i = 0; i < GG_ORDINALS; i++) {
		struct device *device = __atomic_load_n(&devices[i], __ATOMIC_ACQUIRE);

		if (!(held >> i & 1))
			continue;
		pthread_rwlock_unlock(&device->in_use);
	}
	if (gone)
		__atomic_add_fetch(&epoch, 1, __ATOMIC_ACQ_REL);
	pthread_mutex_unlock(&ending);
}
