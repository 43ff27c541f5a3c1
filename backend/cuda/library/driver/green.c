// SPDX-License-Identifier: Apache-2.0
/*
 * Calls of one green context are made by one thread at a time, as the driver asks for: under `lock`, and none is left
 * current.
 */

#include "green.h"

#include <pthread.h>
#include <stdlib.h>

#include "device.h"
#include "driver.h"
#include "life.h"
#include "log.h"

static struct split {
	bool known;
	CUresult result;		/* of the split */
	struct green_shape shape;
	CUdevResource groups[GREEN_GROUPS];
	struct green *greens;
	CUcontext primary;		/* which they keep */
} splits[GG_ORDINALS];			/* under `lock` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool has_driver(void)
{
	return real.cuDeviceGetDevResource && real.cuDevSmResourceSplitByCount && real.cuDevResourceGenerateDesc &&
	       real.cuGreenCtxCreate && real.cuCtxFromGreenCtx && real.cuGreenCtxStreamCreate &&
	       real.cuGreenCtxDestroy && real.cuDevicePrimaryCtxGetState;
}

/* Return the fewest SMs of a part. CUDA 12 did not tell: then by the architecture (cuda.h, "Green Contexts"). */
static unsigned int least(CUdevice ordinal, const CUdevResource *all)
{
	int major = 0;

	if (all->sm.minSmPartitionSize && all->sm.minSmPartitionSize <= all->sm.smCount)
		return all->sm.minSmPartitionSize;
	real.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ordinal);
	return major >= 9 ? 8 : major == 8 ? 4 : 2;
}

static CUresult divide(struct split *split, CUdevice ordinal)
{
	CUdevResource all = { 0 }, rest;
	CUresult result;
	unsigned int count = 0, each;

	if (!has_driver())
		return CUDA_ERROR_NOT_SUPPORTED;
	result = real.cuDeviceGetDevResource(ordinal, &all, CU_DEV_RESOURCE_TYPE_SM);
	if (result)
		return result;
	each = least(ordinal, &all);
	result = real.cuDevSmResourceSplitByCount(NULL, &count, &all, &rest, 0, each);
	if (result)
		return result;
	if (count > GREEN_GROUPS)
		count = GREEN_GROUPS;
	result = real.cuDevSmResourceSplitByCount(split->groups, &count, &all, &rest, 0, each);
	if (result)
		return result;
	if (!count)
		return CUDA_ERROR_NOT_SUPPORTED;
	split->shape = (struct green_shape){ count, split->groups[0].sm.smCount, all.sm.smCount };
	return CUDA_SUCCESS;
}

/* Return the split of a GPU; NULL where there is none. With `lock` held. */
static struct split *split_of(CUdevice ordinal)
{
	struct split *split = &splits[ordinal];

	if (!split->known) {
		split->result = divide(split, ordinal);
		split->known = true;
		log_line("device %d: %u groups of %u of %u SMs, error %d", ordinal, split->shape.groups,
			 split->shape.each, split->shape.all, (int)split->result);
	}
	return split->result ? NULL : split;
}

CUresult green_shape(CUdevice ordinal, struct green_shape *shape)
{
	CUresult result;

	if (ordinal < 0 || ordinal >= GG_ORDINALS)
		return CUDA_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	split_of(ordinal);
	*shape = splits[ordinal].shape;
	result = splits[ordinal].result;
	pthread_mutex_unlock(&lock);
	return result;
}

CUcontext green_primary(CUdevice ordinal)
{
	CUcontext context = NULL;
	unsigned int flags;
	int active = 0;

	if (!real.cuDevicePrimaryCtxGetState || real.cuDevicePrimaryCtxGetState(ordinal, &flags, &active) || !active)
		return NULL;
	if (real.cuDevicePrimaryCtxRetain(&context, ordinal))
		return NULL;
	if (real.cuDevicePrimaryCtxRelease_v2)
		real.cuDevicePrimaryCtxRelease_v2(ordinal);
	else
		real.cuDevicePrimaryCtxRelease(ordinal);
	return context;
}

static struct green *make(struct split *split, CUdevice ordinal, uint64_t mask)
{
	CUdevResource chosen[GREEN_GROUPS];
	CUdevResourceDesc about;
	struct green *green;
	unsigned int count = 0;

	for (unsigned int i = 0; i < split->shape.groups; i++)
		if (mask >> i & 1)
			chosen[count++] = split->groups[i];
	green = calloc(1, sizeof(*green));
	if (!green || !count || real.cuDevResourceGenerateDesc(&about, chosen, count) ||
	    real.cuGreenCtxCreate(&green->handle, about, ordinal, CU_GREEN_CTX_DEFAULT_STREAM)) {
		free(green);
		return NULL;
	}
	if (real.cuCtxFromGreenCtx(&green->context, green->handle)) {
		real.cuGreenCtxDestroy(green->handle);
		free(green);
		return NULL;
	}
	green->mask = mask;
	split->primary = green_primary(ordinal);
	green->next = split->greens;
	split->greens = green;
	return green;
}

struct green *green_on(CUdevice ordinal, uint64_t mask)
{
	struct green *green = NULL;
	struct split *split;

	pthread_mutex_lock(&lock);
	split = split_of(ordinal);
	for (green = split ? split->greens : NULL; green && green->mask != mask; green = green->next)
		;
	if (split && !green)
		green = make(split, ordinal, mask);
	pthread_mutex_unlock(&lock);
	return green;
}

CUdevice green_keeps(CUcontext primary)
{
	CUdevice ordinal = -1;

	pthread_mutex_lock(&lock);
	for (CUdevice i = 0; i < GG_ORDINALS; i++)
		if (splits[i].greens && splits[i].primary == primary)
			ordinal = i;
	pthread_mutex_unlock(&lock);
	return ordinal;
}

void green_end(CUdevice ordinal)
{
	pthread_mutex_lock(&lock);
	for (struct green *green = splits[ordinal].greens, *next; green; green = next) {
		next = green->next;
		real.cuGreenCtxDestroy(green->handle);
		free(green);
	}
	splits[ordinal].greens = NULL;
	splits[ordinal].primary = NULL;
	pthread_mutex_unlock(&lock);
}

CUevent green_event(CUcontext context)
{
	CUevent event = NULL;

	pthread_mutex_lock(&lock);
	if (!real.cuCtxPushCurrent_v2(context)) {
		if (real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING))
			event = NULL;
		real.cuCtxPopCurrent_v2(&context);
	}
	pthread_mutex_unlock(&lock);
	return event;
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	for (size_t i = 0; i < GG_ORDINALS; i++)
		splits[i] = (struct split){ 0 };
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
