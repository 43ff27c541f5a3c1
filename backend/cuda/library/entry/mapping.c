// SPDX-License-Identifier: Apache-2.0
/*
 * Memory that the program maps, exports, shares between GPUs or asks about: its own physical memory
 * is charged, and what it can do with an allocation of cuMemAlloc it can do with one of ours; the
 * rest is refused as for cuMemAlloc's.
 */

#include <string.h>

#include "async.h"
#include "driver.h"
#include "foreign.h"
#include "ours.h"
#include "pin.h"
#include "region.h"
#include "wrapper.h"

/* Refuses an address of ours as the driver does one of cuMemAlloc; else does `then` where the
 * driver has succeeded. */
#define NOT_OURS_THEN(name, parameters, arguments, address, refusal, then)	\
	WRAPPER name parameters							\
	{									\
		struct region_about about;					\
		CUresult result;						\
										\
		PASS_INSIDE(name, arguments);					\
		if (region_about(address, &about))				\
			return refusal;						\
		CALL_REAL(result, name, arguments);				\
		if (result == CUDA_SUCCESS) {					\
			then;							\
		}								\
		return result;							\
	}
#define NOT_OURS(name, parameters, arguments, address, refusal)			\
	NOT_OURS_THEN(name, parameters, arguments, address, refusal, )

/* Keeps on the GPU what something outside of the process is about to get at. */
static CUresult pin(CUdeviceptr address, size_t bytes)
{
	CUstreamCaptureMode mode = driver_enter();
	CUresult result = pin_range(address, bytes);

	driver_leave(mode);
	return result;
}

#define PINNED(name, parameters, arguments, address, bytes)	\
	WRAPPER name parameters					\
	{							\
		struct region_about about;			\
		CUresult result;				\
								\
		PASS_INSIDE(name, arguments);			\
		if (region_about(address, &about)) {		\
			result = pin(address, bytes);		\
			if (result != CUDA_SUCCESS)		\
				return result;			\
		}						\
		CALL_REAL(result, name, arguments);		\
		if (result == CUDA_SUCCESS)			\
			foreign_share();			\
		return result;					\
	}

/* The program's own physical memory */

WRAPPER cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
		    const CUmemAllocationProp *prop, unsigned long long flags)
{
	struct device *device = NULL;
	CUresult result;

	PASS_INSIDE(cuMemCreate, (handle, size, prop, flags));
	if (prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
		device = device_of(prop->location.id);
	result = foreign_charge(device, size);
	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemCreate, (handle, size, prop, flags));
	if (result == CUDA_SUCCESS) {
		foreign_made_in_host(&prop->location);
		foreign_created(device, *handle, size);
	} else {
		foreign_uncharge(device, size);
	}
	return result;
}

FORWARD_THEN(cuMemRelease, (CUmemGenericAllocationHandle handle), (handle),
	     foreign_released(handle))
NOT_OURS_THEN(cuMemMap,
	      (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
	       unsigned long long flags),
	      (ptr, size, offset, handle, flags), ptr, CUDA_ERROR_INVALID_VALUE,
	      foreign_mapped(ptr, size, handle))
NOT_OURS_THEN(cuMemUnmap, (CUdeviceptr ptr, size_t size), (ptr, size), ptr,
	      CUDA_ERROR_INVALID_VALUE, foreign_unmapped(ptr, size))
/* "The address must be one that cuMemMap mapped": not one of cuMemAlloc. */
NOT_OURS_THEN(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *handle, void *addr),
	      (handle, addr), (CUdeviceptr)(uintptr_t)addr, CUDA_ERROR_INVALID_VALUE,
	      foreign_retained(*handle, (CUdeviceptr)(uintptr_t)addr))
NOT_OURS(cuMemSetAccess, (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count),
	 (ptr, size, desc, count), ptr, CUDA_ERROR_INVALID_VALUE)
FORWARD(cuMemGetAccess, (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr),
	(flags, location, ptr))
FORWARD(cuMemAddressReserve,
	(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
	 unsigned long long flags),
	(ptr, size, alignment, addr, flags))
NOT_OURS(cuMemAddressFree, (CUdeviceptr ptr, size_t size), (ptr, size), ptr,
	 CUDA_ERROR_INVALID_VALUE)
FORWARD_THEN(cuMemExportToShareableHandle,
	     (void *shareableHandle, CUmemGenericAllocationHandle handle,
	      CUmemAllocationHandleType handleType, unsigned long long flags),
	     (shareableHandle, handle, handleType, flags), foreign_share())
/* Another process's memory, charged to that. */
FORWARD_THEN(cuMemImportFromShareableHandle,
	     (CUmemGenericAllocationHandle *handle, void *osHandle,
	      CUmemAllocationHandleType shHandleType),
	     (handle, osHandle, shHandleType), foreign_share())
FORWARD(cuMemGetAllocationPropertiesFromHandle,
	(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle), (prop, handle))
PINNED(cuMemGetHandleForAddressRange,
       (void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType handleType,
	unsigned long long flags),
       (handle, dptr, size, handleType, flags), dptr, size)
PINNED(cuMulticastBindAddr,
       (CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size,
	unsigned long long flags),
       (mcHandle, mcOffset, memptr, size, flags), memptr, size)

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
	if (real.cuCtxPushCurrent_v2(peerContext) == CUDA_SUCCESS) {
		peer = device_current();
		real.cuCtxPopCurrent_v2(&context);
	}
	/* The current context may use from now on all that is, and will be, on the peer. */
	if (peer && peer->regions && peer != device)
		result = pin_peer(peer, device->ordinal);
	if (result != CUDA_SUCCESS) {
		undone = real.cuCtxDisablePeerAccess(peerContext);
		(void)undone;
	}
	ours_leave();
	return result;
}

/* What a peer was given it keeps: that none uses it any more costs nothing but that
 * it stays on the GPU. */
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
		*(CUmemoryPool *)data = NULL;
		if (async_is(about->start) && real.cuDeviceGetDefaultMemPool)
			real.cuDeviceGetDefaultMemPool(data, about->device->ordinal);
		return true;
	default:
		return false;
	}
}

WRAPPER cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	struct region_about about;
	CUresult result;

	PASS_INSIDE(cuPointerGetAttribute, (data, attribute, ptr));
	if (data && region_about(ptr, &about) && answer(&about, attribute, ptr, data, &result))
		return result;
	CALL_REAL(result, cuPointerGetAttribute, (data, attribute, ptr));
	return result;
}

WRAPPER cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes,
			       void **data, CUdeviceptr ptr)
{
	struct region_about about;
	CUresult result, ignored;

	PASS_INSIDE(cuPointerGetAttributes, (numAttributes, attributes, data, ptr));
	CALL_REAL(result, cuPointerGetAttributes, (numAttributes, attributes, data, ptr));
	/* "Data is set to NULL or 0 for attributes that do not apply, and the call succeeds." */
	if (result == CUDA_SUCCESS && region_about(ptr, &about))
		for (unsigned int i = 0; i < numAttributes; i++)
			answer(&about, attributes[i], ptr, data[i], &ignored);
	return result;
}

/* CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, for what maps it into another device. */
PINNED(cuPointerSetAttribute, (const void *value, CUpointer_attribute attribute, CUdeviceptr ptr),
       (value, attribute, ptr), ptr, 1)
