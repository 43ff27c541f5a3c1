// SPDX-License-Identifier: Apache-2.0
/*
 * Green contexts: contexts on some SMs of a GPU, which share code and memory with its primary context. A kernel can ask
 * on which groups it runs (fake_groups).
 */

#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define LEAST 8			/* SMs in a group */

struct CUdevResourceDesc_st {
	enum fake_kind kind;
	uint64_t groups;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread uint64_t running_on;

void fake_run_on(uint64_t groups)
{
	running_on = groups;
}

/* For kernels of the tests: the groups that the one in this thread runs on; 0: all SMs. */
__attribute__((visibility("default"))) uint64_t fake_groups(void)
{
	return running_on;
}

static unsigned int all_sms(void)
{
	return (unsigned int)fake_number("FAKE_SMS", 132);
}

unsigned int fake_sms(uint64_t groups)
{
	return groups ? (unsigned int)__builtin_popcountll(groups) * LEAST : all_sms();
}

CUcontext fake_family(CUcontext context)
{
	return context && context->parent ? context->parent : context;
}

static bool none(void)
{
	return !fake_number("FAKE_GREEN", 1);
}

/* What the driver keeps in a resource of its own: which groups it is. */
static void set_groups(CUdevResource *resource, uint64_t groups)
{
	memset(resource, 0, sizeof(*resource));
	resource->type = CU_DEV_RESOURCE_TYPE_SM;
	resource->sm.smCount = fake_sms(groups);
	resource->sm.minSmPartitionSize = resource->sm.smCoscheduledAlignment = LEAST;
	memcpy(resource->_internal_padding, &groups, sizeof(groups));
}

static uint64_t groups_of(const CUdevResource *resource)
{
	uint64_t groups;

	memcpy(&groups, resource->_internal_padding, sizeof(groups));
	return groups;
}

FAKE_EXPORT cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type)
{
	FAKE(cuDeviceGetDevResource);
	if (device < 0 || device >= fake_devices())
		return CUDA_ERROR_INVALID_DEVICE;
	if (none())
		return CUDA_ERROR_NOT_SUPPORTED;
	if (type != CU_DEV_RESOURCE_TYPE_SM)
		return CUDA_ERROR_INVALID_RESOURCE_TYPE;
	set_groups(resource, 0);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *count, const CUdevResource *input,
					CUdevResource *remaining, unsigned int flags, unsigned int least)
{
	const unsigned int most = all_sms() / LEAST;

	FAKE(cuDevSmResourceSplitByCount);
	(void)remaining;
	if (input->type != CU_DEV_RESOURCE_TYPE_SM || flags || least != LEAST)
		return CUDA_ERROR_INVALID_VALUE;
	if (result && *count < most)
		fake_die("cuDevSmResourceSplitByCount: another split than of all SMs");
	*count = most;
	for (unsigned int i = 0; result && i < most; i++)
		set_groups(&result[i], UINT64_C(1) << i);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDevResourceGenerateDesc(CUdevResourceDesc *about, CUdevResource *resources, unsigned int count)
{
	FAKE(cuDevResourceGenerateDesc);
	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	*about = fake_object(sizeof(**about), FAKE_DEAD);
	for (unsigned int i = 0; i < count; i++) {
		if ((*about)->groups & groups_of(&resources[i]))
			return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
		(*about)->groups |= groups_of(&resources[i]);
	}
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc about, CUdevice device, unsigned int flags)
{
	CUcontext context, parent;

	FAKE(cuGreenCtxCreate);
	if (flags != CU_GREEN_CTX_DEFAULT_STREAM || device < 0 || device >= fake_devices())
		return CUDA_ERROR_INVALID_VALUE;
	parent = fake_primary_retain(device);
	context = fake_context_make(device);
	context->groups = about ? about->groups : 0;
	pthread_mutex_lock(&lock);
	context->parent = parent;
	context->next_green = parent->next_green;
	__atomic_store_n(&parent->next_green, context, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	*green = (CUgreenCtx)context;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
	FAKE(cuCtxFromGreenCtx);
	fake_check(green, FAKE_CONTEXT, "cuCtxFromGreenCtx");
	*context = (CUcontext)green;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGreenCtxDestroy(CUgreenCtx green)
{
	CUcontext context = (CUcontext)green, *at, parent;

	FAKE(cuGreenCtxDestroy);
	fake_check(context, FAKE_CONTEXT, "cuGreenCtxDestroy");
	parent = context->parent;
	pthread_mutex_lock(&lock);
	for (at = &parent->next_green; *at != context; at = &(*at)->next_green)
		;
	__atomic_store_n(at, context->next_green, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	for (struct fake_stream *stream = context->streams; stream; stream = stream->next)
		if (stream->kind == FAKE_STREAM && stream->explicit)
			fake_die("cuGreenCtxDestroy: a stream of it is left");
	fake_context_destroy(context);
	fake_primary_release(parent->device);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned int flags, int priority)
{
	struct fake_stream *made;

	FAKE(cuGreenCtxStreamCreate);
	fake_check(green, FAKE_CONTEXT, "cuGreenCtxStreamCreate");
	if (flags != CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&fake_lock);
	made = fake_stream_make((CUcontext)green, false, priority);
	made->explicit = true;
	pthread_mutex_unlock(&fake_lock);
	*stream = (CUstream)made;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared)
{
	FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor);
	(void)function, (void)threads, (void)shared;
	*blocks = 1;
	return CUDA_SUCCESS;
}

/* A cluster lies in one group; without groups, all SMs are one. */
FAKE_EXPORT cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config)
{
	unsigned int blocks = 1;
	uint64_t groups;

	FAKE(cuOccupancyMaxActiveClusters);
	(void)function;
	for (unsigned int i = 0; i < config->numAttrs; i++)
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
			blocks = config->attrs[i].value.clusterDim.x;
	groups = fake_stream_context(fake_stream(config->hStream, false))->groups;
	*clusters = (int)(groups ? (unsigned int)__builtin_popcountll(groups) * (LEAST / blocks) : all_sms() / blocks);
	return CUDA_SUCCESS;
}
