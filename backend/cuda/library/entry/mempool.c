// SPDX-License-Identifier: Apache-2.0
/*
 * Stream-ordered allocation, and the pools that it takes from. The default pool of a device is ours
 * to serve (async.c); the others are the driver's, what is allocated from them charged and named.
 */

#include "async.h"
#include "driver.h"
#include "foreign.h"
#include "memory.h"
#include "parked.h"
#include "pin.h"
#include "pool.h"
#include "quiet.h"
#include "region.h"
#include "stream.h"
#include "turn.h"
#include "wrapper.h"

/* The pool that cuMemAllocAsync takes from, if it is the device's default one:
 * that is ours to serve. */
static bool from_default(const struct device *device, CUmemoryPool pool)
{
	CUmemoryPool standard = NULL;
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;

	if (!pool && real.cuDeviceGetMemPool)
		CALL_REAL(result, cuDeviceGetMemPool, (&pool, device->ordinal));
	if (real.cuDeviceGetDefaultMemPool)
		CALL_REAL(result, cuDeviceGetDefaultMemPool, (&standard, device->ordinal));
	return result == CUDA_SUCCESS && pool == standard;
}

static CUresult alloc_async(struct device *device, CUdeviceptr *dptr, size_t bytes, CUstream stream,
			    bool per_thread)
{
	CUstreamCaptureMode mode = driver_enter();
	CUdeviceptr address;
	CUresult result;

	quiet_context(device, driver_context());
	result = async_alloc(device, bytes, stream, per_thread, &address);
	if (result == CUDA_SUCCESS)
		*dptr = address;
	driver_leave(mode);
	return result;
}

/* In a capture it becomes a node of the graph, which has memory of its own. */
#define ALLOC_ASYNC(name, parameters, arguments, pool, per_thread)				\
	WRAPPER name parameters									\
	{											\
		struct device *device;								\
		CUresult result;								\
												\
		PASS_INSIDE(name, arguments);							\
		device = device_current();						\
		if (!dptr || !bytesize || !device || stream_captured(hStream, per_thread)) {	\
			CALL_REAL(result, name, arguments);					\
			return result;								\
		}										\
		if (memory_elastic(device) && from_default(device, pool))			\
			return alloc_async(device, dptr, bytesize, hStream, per_thread);	\
		FOREIGN(result, device, bytesize, *dptr, name, arguments);			\
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
		struct region_about about;						\
		CUresult result;							\
		bool ours;								\
											\
		PASS_INSIDE(name, (dptr, hStream));					\
		turn_enter(TURN_OTHER, hStream, per_thread);				\
		ours = region_about(dptr, &about);					\
		if (ours)								\
			result = free_ours(dptr, &about, hStream, per_thread);		\
		else									\
			CALL_REAL(result, name, (dptr, hStream));			\
		gate_leave();								\
		if (result == CUDA_SUCCESS && ours)					\
			parked_sweep(parked_count() > PARKED_MOST);			\
		else if (result == CUDA_SUCCESS && !stream_captured(hStream, per_thread))	\
			foreign_gone(dptr);						\
		return result;								\
	}

FREE_ASYNC(cuMemFreeAsync, false)
FREE_ASYNC(cuMemFreeAsync_ptsz, true)

/* Pools */

struct pool_search {
	CUmemoryPool pool;
	struct device *device;
};

static void match_pool(struct device *device, void *argument)
{
	struct pool_search *search = argument;

	if (memory_elastic(device) && from_default(device, search->pool))
		search->device = device;
}

/* The device whose default pool it is, if we serve that. */
static struct device *served_by_us(CUmemoryPool pool)
{
	struct pool_search search = { .pool = pool };

	if (pool)
		device_each(match_pool, &search);
	return search.device;
}

WRAPPER cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	struct device *device;
	CUstreamCaptureMode mode;
	CUresult result;

	PASS_INSIDE(cuMemPoolTrimTo, (pool, minBytesToKeep));
	device = served_by_us(pool);
	CALL_REAL(result, cuMemPoolTrimTo, (pool, minBytesToKeep));
	if (device && result == CUDA_SUCCESS) {
		mode = driver_enter();
		parked_sweep(false);
		pool_trim(device, minBytesToKeep);
		driver_leave(mode);
	}
	return result;
}

WRAPPER cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	struct device *device;
	uint64_t used, parked;
	CUresult result;

	PASS_INSIDE(cuMemPoolGetAttribute, (pool, attr, value));
	device = served_by_us(pool);
	CALL_REAL(result, cuMemPoolGetAttribute, (pool, attr, value));
	if (result != CUDA_SUCCESS || !device)
		return result;
	if (attr != CU_MEMPOOL_ATTR_USED_MEM_CURRENT &&
	    attr != CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
		return result;
	async_usage(device, &used, &parked);
	*(cuuint64_t *)value += used + (attr == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? parked : 0);
	return result;
}

/* Everything on `device` is for the GPU `peer` too. */
static CUresult give_access(struct device *device, CUdevice peer)
{
	CUstreamCaptureMode mode = driver_enter();
	CUresult result = pin_peer(device, peer);

	driver_leave(mode);
	return result;
}

WRAPPER cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	struct device *device;
	CUresult result;

	PASS_INSIDE(cuMemPoolSetAccess, (pool, map, count));
	device = served_by_us(pool);
	CALL_REAL(result, cuMemPoolSetAccess, (pool, map, count));
	for (size_t i = 0; device && i < count && result == CUDA_SUCCESS; i++)
		if (map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
		    map[i].location.id != device->ordinal &&
		    map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			result = give_access(device, map[i].location.id);
	return result;
}

FORWARD_THEN(cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *poolProps), (pool, poolProps),
	     foreign_made_in_host(&poolProps->location))
FORWARD(cuMemPoolDestroy, (CUmemoryPool pool), (pool))
FORWARD(cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attr, void *value),
	(pool, attr, value))
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

