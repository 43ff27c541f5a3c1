// SPDX-License-Identifier: Apache-2.0
/*
 * Allocation: what can be moved comes from region.c, at the driver's terms; what cannot is the driver's, charged and named.
 *
 * cuMemAlloc in a capture is more lenient than the driver's, which refuses it in the strict modes (cuStreamBeginCapture).
 */

#include <stdlib.h>
#include <string.h>

#include "async.h"
#include "daemon.h"
#include "driver.h"
#include "foreign.h"
#include "gate.h"
#include "mover.h"
#include "region.h"

/* The pitch of the driver on every GPU so far: CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT's 512. */
#define PITCH 512

/*
 * Our calls into the driver while the program may be capturing: allowed, since nothing of them is in a stream of the program
 * (cuThreadExchangeStreamCaptureMode).
 */
static CUstreamCaptureMode begin(void)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	state_enter();
	real.cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

static void end(CUstreamCaptureMode mode)
{
	real.cuThreadExchangeStreamCaptureMode(&mode);
	state_leave();
}

/* With GGROUP_CUDA_IPC=1 nothing moves: legacy IPC (cuIpcGetMemHandle) is for the driver's own allocations only. */
static bool by_driver(void)
{
	const char *ipc = getenv("GGROUP_CUDA_IPC");

	return ipc && !strcmp(ipc, "1");
}

/* Whether allocations on it are ours. */
static bool elastic(const struct device *device)
{
	return device && device->elastic && !by_driver();
}

static CUcontext current_context(void)
{
	CUcontext context = NULL;

	real.cuCtxGetCurrent(&context);
	return context;
}

/* An allocation of the driver's own, that `address` tells afterwards: charged before, or undone. */
#define FOREIGN(result, device, bytes, address, name, arguments)				\
	do {											\
		(result) = foreign_charge((device), (bytes));					\
		if ((result) == CUDA_SUCCESS) {							\
			CALL_REAL(result, name, arguments);					\
			if ((result) == CUDA_SUCCESS)						\
				foreign_is((device), (uint64_t)(address), (bytes), current_context()); \
			else									\
				foreign_uncharge((device), (bytes));				\
		}										\
	} while (0)

static CUresult alloc(struct device *device, size_t bytes, CUdeviceptr *address)
{
	CUstreamCaptureMode mode = begin();
	CUresult result;

	mover_context(device, current_context());
	async_sweep(false);
	result = region_alloc(device, bytes, 0, address);
	if (result == CUDA_ERROR_OUT_OF_MEMORY) {
		async_sweep(true);
		result = region_alloc(device, bytes, 0, address);
	}
	end(mode);
	return result;
}

WRAPPER cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	struct device *device;
	CUdeviceptr address;
	CUresult result;

	PASS_INSIDE(cuMemAlloc_v2, (dptr, bytesize));
	device = state_current_device();
	if (!dptr || !bytesize || !device) {	/* the driver knows the error */
		CALL_REAL(result, cuMemAlloc_v2, (dptr, bytesize));
		return result;
	}
	if (!elastic(device)) {
		FOREIGN(result, device, bytesize, *dptr, cuMemAlloc_v2, (dptr, bytesize));
		return result;
	}
	result = alloc(device, bytesize, &address);
	if (result == CUDA_SUCCESS)
		*dptr = address;
	return result;
}

WRAPPER cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
			   unsigned int ElementSizeBytes)
{
	struct device *device;
	CUdeviceptr address;
	CUresult result;
	size_t pitch, bytes;

	PASS_INSIDE(cuMemAllocPitch_v2, (dptr, pPitch, WidthInBytes, Height, ElementSizeBytes));
	device = state_current_device();
	pitch = (WidthInBytes + PITCH - 1) & ~(size_t)(PITCH - 1);
	/* cuMemAllocPitch: ElementSizeBytes may be 4, 8 or 16. */
	if (!dptr || !pPitch || !WidthInBytes || !Height || !device || pitch < WidthInBytes ||
	    (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16) ||
	    __builtin_mul_overflow(pitch, Height, &bytes)) {
		CALL_REAL(result, cuMemAllocPitch_v2, (dptr, pPitch, WidthInBytes, Height, ElementSizeBytes));
		return result;
	}
	if (!elastic(device)) {
		FOREIGN(result, device, bytes, *dptr, cuMemAllocPitch_v2,
			(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes));
		return result;
	}
	result = alloc(device, bytes, &address);
	if (result == CUDA_SUCCESS) {
		*dptr = address;
		*pPitch = pitch;
	}
	return result;
}

WRAPPER cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	struct device *device;
	CUresult result;

	PASS_INSIDE(cuMemAllocManaged, (dptr, bytesize, flags));
	device = state_current_device();
	CALL_REAL(result, cuMemAllocManaged, (dptr, bytesize, flags));
	if (result == CUDA_SUCCESS)
		foreign_is_managed(device, *dptr, bytesize, current_context());
	return result;
}

/* As cuMemFree does: what uses it has ended before it goes. */
static CUresult free_elastic(const struct region_about *about)
{
	CUstreamCaptureMode mode = begin();
	CUresult result;

	async_sweep(false);
	if (!async_take(about->start)) {
		result = CUDA_ERROR_INVALID_VALUE;	/* cuMemFreeAsync was first */
	} else if (gate_capturing()) {
		/* A context with a capture cannot be waited for. */
		result = async_later(about->device, about->start) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		result = mover_drain(about->device);
		if (result == CUDA_SUCCESS)
			result = region_free(about->start);
	}
	end(mode);
	return result;
}

WRAPPER cuMemFree_v2(CUdeviceptr dptr)
{
	struct region_about about;
	CUresult result;

	PASS_INSIDE(cuMemFree_v2, (dptr));
	if (region_about(dptr, &about))
		return about.start == dptr ? free_elastic(&about) : CUDA_ERROR_INVALID_VALUE;
	CALL_REAL(result, cuMemFree_v2, (dptr));
	if (result == CUDA_SUCCESS)
		foreign_gone(dptr);
	return result;
}

/* Stream-ordered */

static bool capturing(CUstream stream, bool per_thread)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result;

	if (per_thread)
		CALL_REAL(result, cuStreamIsCapturing_ptsz, (stream, &status));
	else
		CALL_REAL(result, cuStreamIsCapturing, (stream, &status));
	/* The legacy stream while another is captured: the driver is to say what it thinks of it. */
	return result != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* The pool that cuMemAllocAsync takes from, if it is the device's default one: that is ours to serve. */
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

static CUresult alloc_async(struct device *device, CUdeviceptr *dptr, size_t bytes, CUstream stream, bool per_thread)
{
	CUstreamCaptureMode mode = begin();
	CUdeviceptr address;
	CUresult result;

	mover_context(device, current_context());
	result = async_alloc(device, bytes, stream, per_thread, &address);
	if (result == CUDA_SUCCESS)
		*dptr = address;
	end(mode);
	return result;
}

/* In a capture it becomes a node of the graph, which has memory of its own. */
#define ALLOC_ASYNC(name, parameters, arguments, pool, per_thread)					\
	WRAPPER name parameters										\
	{												\
		struct device *device;									\
		CUresult result;									\
													\
		PASS_INSIDE(name, arguments);								\
		device = state_current_device();							\
		if (!dptr || !bytesize || !device || capturing(hStream, per_thread)) {			\
			CALL_REAL(result, name, arguments);						\
			return result;									\
		}											\
		if (elastic(device) && from_default(device, pool))					\
			return alloc_async(device, dptr, bytesize, hStream, per_thread);		\
		FOREIGN(result, device, bytesize, *dptr, name, arguments);				\
		return result;										\
	}

ALLOC_ASYNC(cuMemAllocAsync, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream), (dptr, bytesize, hStream), NULL, false)
ALLOC_ASYNC(cuMemAllocAsync_ptsz, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream), (dptr, bytesize, hStream), NULL,
	    true)
ALLOC_ASYNC(cuMemAllocFromPoolAsync, (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
	    (dptr, bytesize, pool, hStream), pool, false)
ALLOC_ASYNC(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),
	    (dptr, bytesize, pool, hStream), pool, true)

static CUresult free_async(CUdeviceptr address, CUstream stream, bool per_thread)
{
	CUstreamCaptureMode mode;
	CUresult result;

	/* In a capture only what a graph allocated can be freed; ours is not that. */
	if (capturing(stream, per_thread))
		return CUDA_ERROR_INVALID_VALUE;
	mode = begin();
	result = async_free(address, stream, per_thread);
	end(mode);
	return result == CUDA_ERROR_NOT_FOUND ? CUDA_ERROR_INVALID_VALUE : result;
}

#define FREE_ASYNC(name, per_thread)						\
	WRAPPER name(CUdeviceptr dptr, CUstream hStream)			\
	{									\
		struct region_about about;					\
		CUresult result;						\
										\
		PASS_INSIDE(name, (dptr, hStream));				\
		if (region_about(dptr, &about))					\
			return about.start == dptr ? free_async(dptr, hStream, per_thread) : CUDA_ERROR_INVALID_VALUE; \
		CALL_REAL(result, name, (dptr, hStream));			\
		if (result == CUDA_SUCCESS && !capturing(hStream, per_thread))	\
			foreign_gone(dptr);					\
		return result;							\
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

	if (elastic(device) && from_default(device, search->pool))
		search->device = device;
}

/* The device whose default pool it is, if we serve that. */
static struct device *served_by_us(CUmemoryPool pool)
{
	struct pool_search search = { .pool = pool };

	if (pool)
		state_devices(match_pool, &search);
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
		mode = begin();
		async_sweep(false);
		pool_trim(device, minBytesToKeep);
		end(mode);
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
	if (attr != CU_MEMPOOL_ATTR_USED_MEM_CURRENT && attr != CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
		return result;
	async_usage(device, &used, &parked);
	*(cuuint64_t *)value += used + (attr == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? parked : 0);
	return result;
}

/* Everything on `device` is for the GPU `peer` too. */
static CUresult give_access(struct device *device, CUdevice peer)
{
	CUstreamCaptureMode mode = begin();
	CUresult result = region_peer(device, peer);

	end(mode);
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
		if (map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && map[i].location.id != device->ordinal &&
		    map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			result = give_access(device, map[i].location.id);
	return result;
}

FORWARD(cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *poolProps), (pool, poolProps))
FORWARD(cuMemPoolDestroy, (CUmemoryPool pool), (pool))
FORWARD(cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attr, void *value), (pool, attr, value))
FORWARD(cuMemPoolGetAccess, (CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location),
	(flags, memPool, location))
FORWARD(cuMemPoolExportToShareableHandle,
	(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags),
	(handle_out, pool, handleType, flags))
FORWARD(cuMemPoolImportFromShareableHandle,
	(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags),
	(pool_out, handle, handleType, flags))
FORWARD(cuMemPoolExportPointer, (CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr), (shareData_out, ptr))
FORWARD(cuMemPoolImportPointer, (CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData),
	(ptr_out, pool, shareData))

/* How much there is */

FORWARD(cuMemGetInfo, (unsigned int *free, unsigned int *total), (free, total))
FORWARD(cuDeviceTotalMem, (unsigned int *bytes, CUdevice dev), (bytes, dev))

WRAPPER cuMemGetInfo_v2(size_t *free, size_t *total)
{
	struct device *device;
	uint64_t limit, left;
	CUresult result;

	PASS_INSIDE(cuMemGetInfo_v2, (free, total));
	device = state_current_device();
	CALL_REAL(result, cuMemGetInfo_v2, (free, total));
	if (result != CUDA_SUCCESS || !device)
		return result;
	if (device->pool) {	/* what is kept for the next allocation is free */
		uint64_t kept = pool_kept(device);

		if (free && *free + kept > *free)
			*free += kept;
	}
	if (!daemon_limits(device, &limit, &left))
		return result;
	if (total && *total > limit)
		*total = limit;
	if (free && *free > left)
		*free = left;
	return result;
}

WRAPPER cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	struct device *device;
	uint64_t limit, left;
	CUresult result;

	PASS_INSIDE(cuDeviceTotalMem_v2, (bytes, dev));
	CALL_REAL(result, cuDeviceTotalMem_v2, (bytes, dev));
	device = result == CUDA_SUCCESS ? state_device(dev) : NULL;
	if (device && daemon_limits(device, &limit, &left) && *bytes > limit)
		*bytes = limit;
	return result;
}

WRAPPER cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	struct region_about about;
	CUresult result;

	PASS_INSIDE(cuMemGetAddressRange_v2, (pbase, psize, dptr));
	if (!region_about(dptr, &about)) {
		CALL_REAL(result, cuMemGetAddressRange_v2, (pbase, psize, dptr));
		return result;
	}
	if (pbase)	/* either may be NULL, and is ignored then */
		*pbase = about.start;
	if (psize)
		*psize = about.bytes;
	return CUDA_SUCCESS;
}

/* What state.c tells */

void memory_context_gone(struct device *device, CUcontext context)
{
	CUstreamCaptureMode mode = begin();

	mover_context_gone(device, context);
	if (device->regions) {
		region_context_gone(device, context);
		async_context_gone(context);
	}
	foreign_context_gone(context);
	end(mode);
}

void memory_forget(void)
{
	region_forget();
	async_forget();
	foreign_forget();
}
