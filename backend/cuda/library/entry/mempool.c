// SPDX-License-Identifier: Apache-2.0
/*
 * Stream-ordered allocation, and the pools that it takes from. The default pool of a device is ours to serve (async.c),
 * and those of the program's own that can be (source.h); the others are the driver's, what is allocated from them
 * charged and named.
 */

#include <stdlib.h>
#include <string.h>

#include "async.h"
#include "detour.h"
#include "driver.h"
#include "foreign.h"
#include "life.h"
#include "memory.h"
#include "parked.h"
#include "peer.h"
#include "pool.h"
#include "quiet.h"
#include "region.h"
#include "source.h"
#include "stream.h"
#include "turn.h"
#include "wrapper.h"

/* The default pools, by ordinal, as far as they were asked for: a device has one for good. Atomically. */
static CUmemoryPool standards[GG_ORDINALS];

static CUresult default_pool(const struct device *device, CUmemoryPool *pool)
{
	CUresult result = CUDA_SUCCESS;

	*pool = __atomic_load_n(&standards[device->ordinal], __ATOMIC_RELAXED);
	if (*pool)
		return result;
	if (!real.cuDeviceGetDefaultMemPool)
		return CUDA_ERROR_NOT_SUPPORTED;
	CALL_REAL(result, cuDeviceGetDefaultMemPool, (pool, device->ordinal));
	if (result == CUDA_SUCCESS)
		__atomic_store_n(&standards[device->ordinal], *pool, __ATOMIC_RELAXED);
	return result;
}

/* Whether the pool that cuMemAllocAsync takes from (NULL: the current one) is ours to serve; `usage`: NULL: the default
 * one. */
static bool from_ours(const struct device *device, CUmemoryPool pool, struct usage **usage)
{
	CUmemoryPool standard;
	CUresult result = CUDA_SUCCESS;
	struct source source;

	*usage = NULL;
	if (!pool && real.cuDeviceGetMemPool)
		CALL_REAL(result, cuDeviceGetMemPool, (&pool, device->ordinal));
	if (!pool || result != CUDA_SUCCESS)
		return false;
	if (source_find(pool, &source)) {
		*usage = source.usage;
		return source.ours && source.location.id == device->ordinal;
	}
	return default_pool(device, &standard) == CUDA_SUCCESS && pool == standard;
}

/* What an allocation that the driver places is charged to; NULL: no GPU. */
struct charged {
	struct device *device;
	bool managed;
	CUmemoryPool pool;
};

static void match_charged(struct device *device, void *argument)
{
	struct charged *charged = argument;
	CUmemoryPool standard;

	if (default_pool(device, &standard) == CUDA_SUCCESS && standard == charged->pool)
		charged->device = device;
}

static struct charged charged_for(struct device *device, CUmemoryPool pool)
{
	struct charged charged = { .device = device, .pool = pool };
	struct source source;

	if (!pool)
		return charged;
	if (!source_find(pool, &source)) {
		device_each(match_charged, &charged);
		return charged;
	}
	charged.device = source.location.type == CU_MEM_LOCATION_TYPE_DEVICE ? device_for_memory(source.location.id) :
									       NULL;
	charged.managed = source.type == CU_MEM_ALLOCATION_TYPE_MANAGED;
	return charged;
}

static CUresult alloc_async(struct device *device, struct usage *usage, CUdeviceptr *dptr, size_t bytes,
			    CUstream stream, bool per_thread)
{
	CUstreamCaptureMode mode = driver_enter();
	CUdeviceptr address;
	CUresult result;

	quiet_context(device, driver_context());
	result = async_alloc(device, usage, bytes, stream, per_thread, &address);
	if (result == CUDA_SUCCESS)
		*dptr = address;
	driver_leave(mode);
	return result;
}

/* "The allocation comes from the memory pool current to the stream's device": whose context is current from then on, if
 * it was another. An error: it is not known which. */
static CUresult enter_stream(CUstream stream, bool per_thread, bool *entered)
{
	CUcontext context = NULL, current = driver_context();
	CUresult result = CUDA_SUCCESS;

	*entered = false;
	if (!current || !stream || stream == CU_STREAM_LEGACY || stream_is_own(stream, per_thread) ||
	    !real.cuStreamGetCtx)
		return result;
	CALL_REAL(result, cuStreamGetCtx, (stream, &context));
	if (result != CUDA_SUCCESS || context == current)
		return result;
	CALL_REAL(result, cuCtxPushCurrent_v2, (context));
	*entered = result == CUDA_SUCCESS;
	return result;
}

static void leave_stream(bool entered)
{
	CUcontext context;
	CUresult ignored;

	if (entered)
		CALL_REAL(ignored, cuCtxPopCurrent_v2, (&context));
	(void)ignored;
}

/* In a capture it becomes a node of the graph, which has memory of its own. */
#define ALLOC_ASYNC(name, parameters, arguments, pool, per_thread)				\
	static CUresult name##_there parameters							\
	{											\
		struct device *device = device_current();					\
		struct charged charged;								\
		struct usage *usage;								\
		CUresult result;								\
												\
		if (!device || stream_captured(hStream, per_thread)) {				\
			CALL_REAL(result, name, arguments);					\
			return result;								\
		}										\
		if (memory_elastic(device) && from_ours(device, pool, &usage))			\
			return alloc_async(device, usage, dptr, bytesize, hStream, per_thread);	\
		charged = charged_for(device, pool);						\
		if (!charged.managed) {								\
			FOREIGN(result, charged.device, bytesize, *dptr, name, arguments);	\
			return result;								\
		}										\
		CALL_REAL(result, name, arguments);						\
		if (result == CUDA_SUCCESS)							\
			foreign_is_managed(charged.device, *dptr, bytesize, driver_context());	\
		return result;									\
	}											\
												\
	WRAPPER name parameters									\
	{											\
		CUresult result;								\
		bool entered;									\
												\
		PASS_INSIDE(name, arguments);							\
		if (!dptr || !bytesize) {							\
			CALL_REAL(result, name, arguments);					\
			return result;								\
		}										\
		result = enter_stream(hStream, per_thread, &entered);				\
		if (result == CUDA_SUCCESS && detour_on())					\
			detour_home(hStream, per_thread);					\
		if (result == CUDA_SUCCESS)							\
			result = name##_there arguments;					\
		if (result == CUDA_SUCCESS && detour_on())					\
			detour_worked(hStream, per_thread);					\
		leave_stream(entered);								\
		return result;									\
	}

ALLOC_ASYNC(cuMemAllocAsync, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream),
	    (dptr, bytesize, hStream), NULL, false)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream),
	    (dptr, bytesize, hStream), NULL, true)
ALLOC_ASYNC(cuMemAllocFromPoolAsync,
	    (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
	    (dptr, bytesize, pool, hStream), pool, false)
ALLOC_ASYNC(cuMemAllocFromPoolAsync_ptsz,
	    (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
	    (dptr, bytesize, pool, hStream), pool, true)

static CUresult free_ours(CUdeviceptr address, const struct region_about *about, CUstream stream, bool per_thread)
{
	CUstreamCaptureMode mode;
	CUresult result;

	/* In a capture only what a graph allocated can be freed; ours is not that. */
	if (about->start != address || stream_captured(stream, per_thread))
		return CUDA_ERROR_INVALID_VALUE;
	mode = driver_enter();
	result = async_free(address, stream, per_thread);
	driver_leave(mode);
	return result == CUDA_ERROR_NOT_FOUND ? CUDA_ERROR_INVALID_VALUE : result;
}

/* Its place in the stream is work for the GPU, an event of ours or the driver's own: without a turn it would not be
 * reached, and have all wait that wait for the contexts. */
#define FREE_ASYNC(name, per_thread)							\
	WRAPPER name(CUdeviceptr dptr, CUstream hStream)				\
	{										\
		struct foreign *foreign = NULL;						\
		struct region_about about;						\
		CUresult result;							\
		bool ours;								\
											\
		PASS_INSIDE(name, (dptr, hStream));					\
		turn_enter(TURN_OTHER, hStream, per_thread);				\
		ours = region_about(dptr, &about);					\
		/* In a capture it is not freed, and its node has no part in the books. */	\
		if (!ours && !stream_captured(hStream, per_thread))			\
			foreign = foreign_take(dptr);					\
		if (ours)								\
			result = free_ours(dptr, &about, hStream, per_thread);		\
		else									\
			CALL_REAL(result, name, (dptr, hStream));			\
		turn_leave(hStream, per_thread);					\
		if (result == CUDA_SUCCESS && ours)					\
			parked_sweep(parked_count() > PARKED_MOST);			\
		foreign_taken(foreign, dptr, result == CUDA_SUCCESS);			\
		return result;								\
	}

FREE_ASYNC(cuMemFreeAsync, false)
FREE_ASYNC(cuMemFreeAsync_ptsz, true)

/* Pools */

/* A pool of which we serve all, or some. */
struct served {
	CUmemoryPool pool;
	struct usage *usage;	/* what is ours of it; NULL: nothing, all is the driver's */
	CUdevice ordinal;	/* the GPU that it is on; */
	struct device *device;	/* ... NULL: which is not set up */
	CUresult result;
};

static void match_pool(struct device *device, void *argument)
{
	struct served *served = argument;
	CUmemoryPool standard;
	CUresult result;

	if (!memory_elastic(device))
		return;
	result = default_pool(device, &standard);
	if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_SUPPORTED)
		served->result = result;
	else if (result == CUDA_SUCCESS && standard == served->pool)
		served->device = device;
}

static void match_ordinal(struct device *device, void *argument)
{
	struct served *served = argument;

	if (device->ordinal == served->ordinal)
		served->device = device;
}

/* What we have to do with a pool. An error: that is not known, and what is asked of the pool is not to be done by
 * halves. */
static CUresult served_by_us(CUmemoryPool pool, struct served *served)
{
	struct source source;

	*served = (struct served){ .pool = pool };
	if (!pool)
		return CUDA_SUCCESS;
	if (source_find(pool, &source)) {
		served->usage = source.usage;
		served->ordinal = source.location.id;
		if (served->usage)
			device_each(match_ordinal, served);
		return CUDA_SUCCESS;
	}
	device_each(match_pool, served);
	if (!served->device)
		return served->result;
	served->usage = async_default(served->device);
	served->ordinal = served->device->ordinal;
	return CUDA_SUCCESS;
}

WRAPPER cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	CUstreamCaptureMode mode;
	struct served served;
	CUresult result;

	PASS_INSIDE(cuMemPoolTrimTo, (pool, minBytesToKeep));
	result = served_by_us(pool, &served);
	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemPoolTrimTo, (pool, minBytesToKeep));
	if (served.device && result == CUDA_SUCCESS) {
		mode = driver_enter();
		parked_sweep(false);
		pool_trim(served.device, minBytesToKeep);
		driver_leave(mode);
	}
	return result;
}

static bool is_about_bytes(CUmemPool_attribute attribute)
{
	return attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT || attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH ||
	       attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT || attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
}

WRAPPER cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	struct served served;
	CUresult result;

	PASS_INSIDE(cuMemPoolGetAttribute, (pool, attr, value));
	result = served_by_us(pool, &served);
	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemPoolGetAttribute, (pool, attr, value));
	if (result == CUDA_SUCCESS && served.usage && is_about_bytes(attr))
		*(cuuint64_t *)value += async_usage_get(served.usage, attr);
	return result;
}

/* What was the most is set to 0, for what is there now. */
WRAPPER cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	struct served served;
	CUresult result;

	PASS_INSIDE(cuMemPoolSetAttribute, (pool, attr, value));
	result = served_by_us(pool, &served);
	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemPoolSetAttribute, (pool, attr, value));
	if (result == CUDA_SUCCESS && served.usage)
		async_usage_reset(served.usage, attr);
	return result;
}

/* Everything on `device` is for the GPU `peer` too. */
static CUresult give_access(struct device *device, CUdevice peer)
{
	CUstreamCaptureMode mode = driver_enter();
	CUresult result = peer_give(device, peer);

	driver_leave(mode);
	return result;
}

static bool is_for_another(const CUmemAccessDesc *access, CUdevice ordinal)
{
	return access->location.type == CU_MEM_LOCATION_TYPE_DEVICE && access->location.id != ordinal &&
	       access->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

WRAPPER cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	struct served served;
	CUresult result;

	PASS_INSIDE(cuMemPoolSetAccess, (pool, map, count));
	result = served_by_us(pool, &served);
	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemPoolSetAccess, (pool, map, count));
	for (size_t i = 0; served.usage && i < count && result == CUDA_SUCCESS; i++) {
		if (!is_for_another(&map[i], served.ordinal))
			continue;
		source_leave(pool);
		/* Where a pool of the program's own has nothing of ours yet, none of ours is concerned. */
		if (served.device && (served.usage == async_default(served.device) || !async_usage_empty(served.usage)))
			result = give_access(served.device, map[i].location.id);
	}
	return result;
}

FORWARD_THEN(cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *poolProps), (pool, poolProps),
	     foreign_made_in_host(&poolProps->location); source_enter(*pool, poolProps))

/* Its value may be another's as soon as it is gone. */
WRAPPER cuMemPoolDestroy(CUmemoryPool pool)
{
	struct source *source;
	CUresult result;

	PASS_INSIDE(cuMemPoolDestroy, (pool));
	source = source_take(pool);
	CALL_REAL(result, cuMemPoolDestroy, (pool));
	if (result != CUDA_SUCCESS) {
		source_give_back(pool, source);
		return result;
	}
	if (source && source->usage)
		async_usage_gone(source->usage);
	free(source);
	return result;
}

FORWARD(cuMemPoolGetAccess,
	(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location),
	(flags, memPool, location))
FORWARD_THEN(cuMemPoolExportToShareableHandle,
	     (void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType,
	      unsigned long long flags),
	     (handle_out, pool, handleType, flags), foreign_share())
FORWARD_THEN(cuMemPoolImportFromShareableHandle,
	     (CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType,
	      unsigned long long flags),
	     (pool_out, handle, handleType, flags), foreign_share())
FORWARD(cuMemPoolExportPointer, (CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr),
	(shareData_out, ptr))
FORWARD(cuMemPoolImportPointer,
	(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData),
	(ptr_out, pool, shareData))

static void forget(void)
{
	memset(standards, 0, sizeof(standards));
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
