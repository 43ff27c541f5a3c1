// SPDX-License-Identifier: Apache-2.0
/*
 * Addresses that others get at, or that the program asks about: what it can do with an allocation of cuMemAlloc it can
 * do with one of ours, and what with memory that it maps itself, with that.
 */

#include <string.h>

#include "async.h"
#include "driver.h"
#include "foreign.h"
#include "lent.h"
#include "object.h"
#include "ours.h"
#include "peer.h"
#include "pin.h"
#include "region.h"
#include "turn.h"
#include "view.h"
#include "wrapper.h"

/* Keeps on the GPU what a user outside of the process is about to get at: memory of ours, or of the program's own. */
static CUresult pin(CUdeviceptr address, size_t bytes)
{
	CUstreamCaptureMode mode = driver_enter();
	struct region_about about;
	CUresult result = region_about(address, &about) ? pin_range(address, bytes) : pin_objects(address, bytes);

	driver_leave(mode);
	return result;
}

/* What is there lives for as long as a descriptor of it is open (lent.h). */
static void give(CUdeviceptr address, size_t bytes, int fd)
{
	struct object_range range;

	if (region_given(address, bytes, fd))
		return;
	range = object_claim_range(address, bytes);
	for (size_t i = 0; i < range.count; i++) {
		struct region *region = range.views[i]->region;

		region->lent |= lent_give(LENT_REGION(region->serial), fd);
	}
	if (!range.count)
		foreign_exported_at(address, fd);
	object_put_range(&range);
}

WRAPPER cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType,
				      unsigned long long flags)
{
	CUresult result;

	PASS_INSIDE(cuMemGetHandleForAddressRange, (handle, dptr, size, handleType, flags));
	result = pin(dptr, size);
	turn_look();
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuMemGetHandleForAddressRange, (handle, dptr, size, handleType, flags));
	gate_leave();
	if (result == CUDA_SUCCESS)
		foreign_share();
	if (result == CUDA_SUCCESS && handleType == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
		give(dptr, size, *(int *)handle);
	return result;
}

/* Other GPUs */

WRAPPER cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
	struct device *device, *peer = NULL;
	CUcontext context;
	CUresult result, undone;

	PASS_INSIDE(cuCtxEnablePeerAccess, (peerContext, Flags));
	device = device_current();
	CALL_REAL(result, cuCtxEnablePeerAccess, (peerContext, Flags));
	if (result != CUDA_SUCCESS || !device)
		return result;
	ours_enter();
	result = real.cuCtxPushCurrent_v2(peerContext);
	if (result == CUDA_SUCCESS) {
		peer = device_current();
		real.cuCtxPopCurrent_v2(&context);
	}
	/* The current context may use from now on all that is, and will be, on the peer. */
	if (result == CUDA_SUCCESS && peer && peer->regions && peer != device)
		result = peer_give(peer, device->ordinal);
	if (result != CUDA_SUCCESS) {
		undone = real.cuCtxDisablePeerAccess(peerContext);
		(void)undone;
	}
	ours_leave();
	return result;
}

/* A peer keeps the access that it was given: access that is no longer used costs only a look at whether the peer rests,
 * where memory moves. */
FORWARD(cuCtxDisablePeerAccess, (CUcontext peerContext), (peerContext))

/* What the program asks about an address */

/*
 * The answer about one of ours, where the driver would tell that of a mapping, or where the memory
 * is at the moment. False: the driver's answer is right.
 */
static bool answer(const struct region_about *about, CUpointer_attribute attribute,
		   CUdeviceptr address, void *data, CUresult *result)
{
	*result = CUDA_SUCCESS;
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		/* Of stream-ordered memory it is NULL, as it is of no context. */
		*(CUcontext *)data = async_is(about->start) ? NULL : about->context;
		return true;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)data = CU_MEMORYTYPE_DEVICE;
		return true;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)data = address;
		return true;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		*(void **)data = NULL;
		*result = CUDA_ERROR_INVALID_VALUE;
		return true;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		/* The driver counts from 1; ours are far from there. */
		*(unsigned long long *)data = 1ULL << 62 | about->serial;
		return true;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		memset(data, 0, sizeof(bool));
		return true;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = about->device->ordinal;
		return true;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = about->start;
		return true;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = about->bytes;
		return true;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:	/* ipc.h */
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(bool *)data = true;
		return true;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(unsigned long long *)data = 0;
		return true;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		*(unsigned long long *)data = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
		return true;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		if (async_pool(about->start, data) && !*(CUmemoryPool *)data && real.cuDeviceGetDefaultMemPool)
			real.cuDeviceGetDefaultMemPool(data, about->device->ordinal);
		return true;
	default:
		return false;
	}
}

/* The same about a view of an object: of one that has moved the driver would tell of one chunk, where that is, and of
 * one that moves, nothing. What it tells of the reservation, which is the program's own, is right, and of the access,
 * if it is asked while nothing of it moves. */
static bool answer_view(const struct mapped *mapped, CUpointer_attribute attribute, CUdeviceptr address, void *data,
			CUresult *result)
{
	*result = CUDA_SUCCESS;
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)data = CU_MEMORYTYPE_DEVICE;
		return true;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)data = address;
		return true;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		*(void **)data = NULL;
		*result = CUDA_ERROR_INVALID_VALUE;
		return true;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
		*(unsigned long long *)data = 1ULL << 62 | mapped->serial;
		return true;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		memset(data, 0, sizeof(bool));
		return true;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = mapped->device->ordinal;
		return true;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(bool *)data = true;
		return true;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(unsigned long long *)data = mapped->handle_types;
		return true;
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
		*(size_t *)data = mapped->bytes;
		return true;
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
		*(CUdeviceptr *)data = mapped->start;
		return true;
	default:
		return false;
	}
}

/* False: it is nothing of ours, or the driver knows better. */
static bool answer_ours(CUpointer_attribute attribute, CUdeviceptr address, void *data, CUresult *result)
{
	struct region_about about;
	struct mapped mapped;

	if (region_about(address, &about))
		return answer(&about, attribute, address, data, result);
	return object_mapped(address, &mapped) && answer_view(&mapped, attribute, address, data, result);
}

WRAPPER cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	struct region *region;
	CUresult result;
	bool looks;

	PASS_INSIDE(cuPointerGetAttribute, (data, attribute, ptr));
	if (data && answer_ours(attribute, ptr, data, &result))
		return result;
	looks = region_look(ptr);
	region = object_claim_at(ptr);	/* it is mapped while it is asked for */
	CALL_REAL(result, cuPointerGetAttribute, (data, attribute, ptr));
	if (region)
		object_put(region);
	if (looks)
		gate_leave();
	return result;
}

WRAPPER cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes,
			       void **data, CUdeviceptr ptr)
{
	struct region *region;
	CUresult result, ignored;
	bool looks;

	PASS_INSIDE(cuPointerGetAttributes, (numAttributes, attributes, data, ptr));
	looks = region_look(ptr);
	region = object_claim_at(ptr);
	CALL_REAL(result, cuPointerGetAttributes, (numAttributes, attributes, data, ptr));
	if (region)
		object_put(region);
	if (looks)
		gate_leave();
	/* "Data is set to NULL or 0 for attributes that do not apply, and the call succeeds." */
	for (unsigned int i = 0; i < numAttributes && result == CUDA_SUCCESS; i++)
		answer_ours(attributes[i], ptr, data[i], &ignored);
	return result;
}

/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, for memory that is mapped into another device. */
WRAPPER cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	CUresult result;

	PASS_INSIDE(cuPointerSetAttribute, (value, attribute, ptr));
	result = pin(ptr, 1);
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuPointerSetAttribute, (value, attribute, ptr));
	if (result == CUDA_SUCCESS)
		foreign_share();
	return result;
}

/* What is named by an address is there, whatever moves. */
#define MAKE_LOOKS(name, parameters, arguments)		\
	WRAPPER name parameters				\
	{						\
		CUresult result;			\
							\
		PASS_INSIDE(name, arguments);		\
		turn_look();				\
		CALL_REAL(result, name, arguments);	\
		gate_leave();				\
		return result;				\
	}
#include "made.h"
