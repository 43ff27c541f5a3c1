// SPDX-License-Identifier: Apache-2.0
/*
 * Allocation: movable memory comes from region.c, at the driver's terms; other memory is the driver's, charged and
 * named.
 *
 * cuMemAlloc in a capture is more lenient than the driver's, which refuses it in the strict modes
 * (cuStreamBeginCapture). Stream-ordered allocations are in mempool.c.
 */

#include "lent.h"
#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include "async.h"
#include "daemon.h"
#include "driver.h"
#include "foreign.h"
#include "gate.h"
#include "object.h"
#include "parked.h"
#include "pool.h"
#include "quiet.h"
#include "region.h"
#include "sight.h"
#include "unified.h"
#include "wrapper.h"

/* The driver's pitch on every GPU so far: CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512. */
#define PITCH 512

/* With GGROUP_CUDA_IPC=1 nothing moves: legacy IPC (cuIpcGetMemHandle) takes only the driver's own allocations. */
static bool by_driver(void)
{
	const char *ipc = getenv("GGROUP_CUDA_IPC");

	return ipc && !strcmp(ipc, "1");
}

bool memory_elastic(const struct device *device)
{
	return device && device->elastic && !by_driver();
}

static CUresult alloc(struct device *device, size_t bytes, CUdeviceptr *address)
{
	CUstreamCaptureMode mode = driver_enter();
	CUresult result;

	quiet_context(device, driver_context());
	parked_sweep(false);
	result = region_alloc(device, bytes, 0, address);
	if (result == CUDA_ERROR_OUT_OF_MEMORY) {
		lent_sweep();
		parked_sweep(true);
		result = region_alloc(device, bytes, 0, address);
	}
	driver_leave(mode);
	return result;
}

WRAPPER cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	struct device *device;
	CUdeviceptr address;
	CUresult result;

	PASS_INSIDE(cuMemAlloc_v2, (dptr, bytesize));
	device = device_current();
	if (!dptr || !bytesize || !device) {	/* the driver reports the error */
		CALL_REAL(result, cuMemAlloc_v2, (dptr, bytesize));
		return result;
	}
	if (!memory_elastic(device)) {
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
	device = device_current();
	pitch = (WidthInBytes + PITCH - 1) & ~(size_t)(PITCH - 1);
	/* cuMemAllocPitch: ElementSizeBytes may be 4, 8 or 16. */
	if (!dptr || !pPitch || !WidthInBytes || !Height || !device || pitch < WidthInBytes ||
	    (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16) ||
	    __builtin_mul_overflow(pitch, Height, &bytes)) {
		CALL_REAL(result, cuMemAllocPitch_v2,
			  (dptr, pPitch, WidthInBytes, Height, ElementSizeBytes));
		return result;
	}
	if (!memory_elastic(device)) {
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
	device = device_current();
	CALL_REAL(result, cuMemAllocManaged, (dptr, bytesize, flags));
	if (result == CUDA_SUCCESS &&
	    !(memory_elastic(device) && unified_made(device, *dptr, bytesize, driver_context())))
		foreign_is_managed(device, *dptr, bytesize, driver_context());
	return result;
}

/* Free a region as cuMemFree does, once work that uses it has ended. */
static CUresult free_elastic(const struct region_about *about)
{
	CUstreamCaptureMode mode = driver_enter();
	CUresult result;

	parked_sweep(false);
	if (!async_take(about->start)) {
		result = CUDA_ERROR_INVALID_VALUE;	/* cuMemFreeAsync came first */
	} else if (gate_capturing()) {
		/* A context with a capture cannot be waited for. */
		result = async_later(about->device, about->start) ?
			CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	} else {
		result = region_drain(about->device, about->start);
		if (result == CUDA_SUCCESS)
			result = region_free(about->start);
	}
	driver_leave(mode);
	return result;
}

WRAPPER cuMemFree_v2(CUdeviceptr dptr)
{
	struct region_about about;
	struct foreign *foreign;
	struct unified *unified;
	CUresult result;

	PASS_INSIDE(cuMemFree_v2, (dptr));
	if (region_about(dptr, &about))
		return about.start == dptr ? free_elastic(&about) : CUDA_ERROR_INVALID_VALUE;
	foreign = foreign_take(dptr);
	unified = unified_take(dptr);
	CALL_REAL(result, cuMemFree_v2, (dptr));
	unified_taken(unified, result == CUDA_SUCCESS);
	foreign_taken(foreign, dptr, result == CUDA_SUCCESS);
	return result;
}

/* The amount of memory. The total is the one at the first question (sight.h); the free amount follows the current
 * limits. */

/* Ask the daemon, at the first question about a device. */
static void look(CUdevice ordinal)
{
	CUstreamCaptureMode mode;
	CUuuid uuid;
	bool named;

	if (sight_looked(ordinal))
		return;
	mode = driver_enter();
	named = device_uuid(ordinal, &uuid);
	driver_leave(mode);
	if (named)
		sight_look(ordinal, &uuid);
}

/* Return the most bytes that a device appears to have; UINT64_MAX for as much as the driver says. */
static uint64_t total_of(CUdevice ordinal)
{
	uint64_t most = UINT64_MAX, left;
	struct device *device;

	look(ordinal);
	if (!sight_kept(ordinal, &most)) {
		device = device_of(ordinal);
		if (device)
			daemon_limits(device, &most, &left);
	}
	return most;
}

struct amount {
	uint64_t total, free;	/* at most */
};

/* Return the amounts of the current context's device. */
static struct amount amount_here(void)
{
	struct amount amount = { UINT64_MAX, UINT64_MAX };
	struct device *device = device_current();

	if (!device)
		return amount;
	look(device->ordinal);
	daemon_limits(device, &amount.total, &amount.free);
	sight_kept(device->ordinal, &amount.total);
	if (amount.free > amount.total)
		amount.free = amount.total;
	return amount;
}

/* Before CUDA 3.2 figures had 32 bits; larger ones are left as the driver gives them. */
WRAPPER cuMemGetInfo(unsigned int *free, unsigned int *total)
{
	struct amount amount;
	CUresult result;

	PASS_INSIDE(cuMemGetInfo, (free, total));
	CALL_REAL(result, cuMemGetInfo, (free, total));
	if (result != CUDA_SUCCESS)
		return result;
	amount = amount_here();
	if (total && *total > amount.total)
		*total = (unsigned int)amount.total;
	if (free && *free > amount.free)
		*free = (unsigned int)amount.free;
	return result;
}

WRAPPER cuMemGetInfo_v2(size_t *free, size_t *total)
{
	struct device *device;
	struct amount amount;
	CUresult result;

	PASS_INSIDE(cuMemGetInfo_v2, (free, total));
	device = device_current();
	CALL_REAL(result, cuMemGetInfo_v2, (free, total));
	if (result != CUDA_SUCCESS || !device)
		return result;
	if (device->pool) {	/* memory kept for the next allocation counts as free */
		uint64_t kept = pool_kept(device);

		if (free && *free + kept > *free)
			*free += kept;
	}
	amount = amount_here();
	if (total && *total > amount.total)
		*total = amount.total;
	if (free && *free > amount.free)
		*free = amount.free;
	return result;
}

#define TOTAL(name, type)						\
	WRAPPER name(type *bytes, CUdevice dev)				\
	{								\
		uint64_t total;						\
		CUresult result;					\
									\
		PASS_INSIDE(name, (bytes, dev));			\
		CALL_REAL(result, name, (bytes, dev));			\
		if (result != CUDA_SUCCESS || !bytes)			\
			return result;					\
		total = total_of(dev);				\
		if (*bytes > total)					\
			*bytes = (type)total;				\
		return result;						\
	}

TOTAL(cuDeviceTotalMem, unsigned int)
TOTAL(cuDeviceTotalMem_v2, size_t)

WRAPPER cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	struct region_about about;
	struct mapped mapped;
	CUresult result;

	PASS_INSIDE(cuMemGetAddressRange_v2, (pbase, psize, dptr));
	if (!region_about(dptr, &about)) {
		if (object_mapped(dptr, &mapped)) {	/* the driver knows a single chunk, or nothing during a move */
			about.start = mapped.start;
			about.bytes = mapped.bytes;
		} else {
			CALL_REAL(result, cuMemGetAddressRange_v2, (pbase, psize, dptr));
			return result;
		}
	}
	if (pbase)	/* either may be NULL, and is ignored then */
		*pbase = about.start;
	if (psize)
		*psize = about.bytes;
	return CUDA_SUCCESS;
}
