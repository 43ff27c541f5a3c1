// SPDX-License-Identifier: Apache-2.0
/*
 * The program's own physical memory and its mappings. Memory that can move is an object (object.h); the rest is the
 * driver's, and is charged and named (foreign.h). Every handle that the program passes or gets is translated between
 * its name and the driver's (names.h). Addresses of the library's allocations are refused, as the driver refuses those
 * of cuMemAlloc.
 */

#include <stdlib.h>

#include "driver.h"
#include "foreign.h"
#include "gate.h"
#include "handle.h"
#include "lent.h"
#include "memory.h"
#include "names.h"
#include "object.h"
#include "parked.h"
#include "pin.h"
#include "place.h"
#include "region.h"
#include "tree.h"
#include "view.h"
#include "wrapper.h"

/* Handles */

static CUresult create_foreign(struct device *device, CUmemGenericAllocationHandle *handle, size_t size,
			       const CUmemAllocationProp *prop, unsigned long long flags)
{
	CUresult result = foreign_charge(device, size);

	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemCreate, (handle, size, prop, flags));
	if (result == CUDA_SUCCESS)
		result = handle_give(handle, false);
	if (result == CUDA_SUCCESS) {
		foreign_made_in_host(&prop->location);
		foreign_created(device, *handle, size);
	} else {
		foreign_uncharge(device, size);
	}
	return result;
}

WRAPPER cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
		    const CUmemAllocationProp *prop, unsigned long long flags)
{
	struct device *device = NULL;
	CUstreamCaptureMode mode;
	CUresult result;

	PASS_INSIDE(cuMemCreate, (handle, size, prop, flags));
	if (prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
		device = device_for_memory(prop->location.id);
	if (!handle || !device || !memory_elastic(device) || !object_can_move(device, size, prop, flags))
		return create_foreign(device, handle, size, prop, flags);
	result = object_create(device, size, prop, handle);
	if (result == CUDA_ERROR_OUT_OF_MEMORY) {	/* sweep what streams have freed, as for cuMemAlloc */
		mode = driver_enter();
		lent_sweep();
		parked_sweep(true);
		driver_leave(mode);
		result = object_create(device, size, prop, handle);
	}
	return result;
}

/* False: the handle is not an object's. */
static bool release_object(CUmemGenericAllocationHandle handle, CUresult *result)
{
	struct region *region = object_claim(handle);

	if (!region)
		return false;
	*result = region->object->held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	if (region->object->held)
		region->object->held--;
	object_put(region);
	return true;
}

/* First: once released, the value may be given to another allocation. */
WRAPPER cuMemRelease(CUmemGenericAllocationHandle handle)
{
	CUmemGenericAllocationHandle known;
	struct foreign *memory;
	CUresult result;
	bool named;

	PASS_INSIDE(cuMemRelease, (handle));
	if (release_object(handle, &result))
		return result;
	known = names_real(handle);
	memory = foreign_release(handle);
	named = names_released(handle);
	CALL_REAL(result, cuMemRelease, (known));
	if (named && result != CUDA_SUCCESS)
		names_kept(handle);
	foreign_released(memory, handle, result == CUDA_SUCCESS);
	return result;
}

/* "The address must be one that cuMemMap mapped": an address of cuMemAlloc is refused. */
WRAPPER cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	const CUdeviceptr address = (CUdeviceptr)(uintptr_t)addr;
	struct region_about about;
	struct region *region;
	CUresult result;

	PASS_INSIDE(cuMemRetainAllocationHandle, (handle, addr));
	if (region_about(address, &about))
		return CUDA_ERROR_INVALID_VALUE;
	region = handle ? object_claim_at(address) : NULL;
	if (region) {
		region->object->held++;
		*handle = region->object->name;
		object_put(region);
		return CUDA_SUCCESS;
	}
	CALL_REAL(result, cuMemRetainAllocationHandle, (handle, addr));
	if (result == CUDA_SUCCESS)
		result = handle_give(handle, true);
	if (result == CUDA_SUCCESS)
		foreign_retained(*handle, address);
	return result;
}

/* Keeps the memory charged while a descriptor of it is open (lent.h). */
static void exported(CUmemGenericAllocationHandle handle, int fd)
{
	struct region *region = object_claim(handle);

	foreign_share();
	if (!region) {
		foreign_exported(handle, fd);
		return;
	}
	region->lent |= fd >= 0 && lent_give(LENT_REGION(region->serial), fd);
	object_put(region);
}

WRAPPER cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
				     CUmemAllocationHandleType handleType, unsigned long long flags)
{
	CUmemGenericAllocationHandle known;
	CUresult result;

	PASS_INSIDE(cuMemExportToShareableHandle, (shareableHandle, handle, handleType, flags));
	result = handle_fix(handle, &known, NULL);
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuMemExportToShareableHandle, (shareableHandle, known, handleType, flags));
	if (result == CUDA_SUCCESS)
		exported(handle, handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? *(int *)shareableHandle : -1);
	return result;
}

/* Attempts after which an error is passed on. */
#define TRIES 3

/* The GPU of a handle of the driver's; NULL: none that is known. */
static struct device *device_of_handle(CUmemGenericAllocationHandle handle)
{
	CUmemAllocationProp prop = { 0 };
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;

	for (int try = 0; try < TRIES && result != CUDA_SUCCESS && real.cuMemGetAllocationPropertiesFromHandle; try++)
		CALL_REAL(result, cuMemGetAllocationPropertiesFromHandle, (&prop, handle));
	return result == CUDA_SUCCESS && prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE ?
		       device_of(prop.location.id) : NULL;
}

/* Imports memory of another process, which is charged for it, or of the program itself, which may release it by its
 * original name. */
WRAPPER cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
				       CUmemAllocationHandleType shHandleType)
{
	const bool by_descriptor = shHandleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	struct device *device;
	CUresult result;
	uint64_t own;

	PASS_INSIDE(cuMemImportFromShareableHandle, (handle, osHandle, shHandleType));
	/* First: the program may close the descriptor afterwards. */
	own = by_descriptor ? lent_import((int)(intptr_t)osHandle) : 0;
	CALL_REAL(result, cuMemImportFromShareableHandle, (handle, osHandle, shHandleType));
	device = result == CUDA_SUCCESS && own ? device_of_handle(*handle) : NULL;
	if (result == CUDA_SUCCESS) {
		foreign_share();
		result = handle_give(handle, false);
	}
	if (result == CUDA_SUCCESS && own)
		foreign_is_import(device, *handle, own);
	else if (own)
		lent_import_over(own);
	return result;
}

WRAPPER cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	struct region *region;
	CUresult result = CUDA_SUCCESS;

	PASS_INSIDE(cuMemGetAllocationPropertiesFromHandle, (prop, handle));
	region = prop ? object_claim(handle) : NULL;
	if (region && !region->object->whole)
		*prop = region->object->prop;
	else
		CALL_REAL(result, cuMemGetAllocationPropertiesFromHandle,
			  (prop, region ? region->object->whole : names_real(handle)));
	if (region)
		object_put(region);
	return result;
}

/* Mappings */

/* Maps a claimed object. */
static CUresult map(struct region *region, CUdeviceptr ptr, size_t size, size_t offset, unsigned long long flags)
{
	struct view *view;
	CUresult result;
	bool entered;

	if (flags || !size || (ptr | size | offset) % GG_CHUNK || offset > region->reserved ||
	    size > region->reserved - offset)
		return CUDA_ERROR_INVALID_VALUE;
	view = view_new(region, ptr, size, offset);
	if (!view)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = place_enter_view(view);
	if (result != CUDA_SUCCESS) {
		free(view);
		return result;
	}
	pthread_mutex_lock(&tree_lock);
	entered = view_insert(view);
	pthread_mutex_unlock(&tree_lock);
	if (entered)
		return CUDA_SUCCESS;
	CALL_REAL(result, cuMemUnmap, (ptr, size));
	free(view);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

WRAPPER cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
		 unsigned long long flags)
{
	struct region_about about;
	struct region *region;
	CUresult result;

	PASS_INSIDE(cuMemMap, (ptr, size, offset, handle, flags));
	if (region_about(ptr, &about))
		return CUDA_ERROR_INVALID_VALUE;
	region = object_claim(handle);
	if (region) {
		result = map(region, ptr, size, offset, flags);
		object_put(region);
		return result;
	}
	CALL_REAL(result, cuMemMap, (ptr, size, offset, names_real(handle), flags));
	if (result == CUDA_SUCCESS)
		foreign_mapped(ptr, size, handle);
	return result;
}

/* "cuMemUnmap cannot unmap a sub-range of an address range mapped by cuMemMap": nor can it here, although chunks are
 * behind it. */
WRAPPER cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	struct object_range range;
	struct region_about about;
	struct foreign *mappings;
	CUresult result;

	PASS_INSIDE(cuMemUnmap, (ptr, size));
	if (region_about(ptr, &about))
		return CUDA_ERROR_INVALID_VALUE;
	range = object_claim_range(ptr, size);
	if (range.failed || range.parted) {
		result = range.failed ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
		object_put_range(&range);
		return result;
	}
	mappings = foreign_unmap(ptr, size);
	object_unmap_range(&range);
	CALL_REAL(result, cuMemUnmap, (ptr, size));
	object_unmapped_range(&range, result == CUDA_SUCCESS);
	foreign_unmapped(mappings, result == CUDA_SUCCESS);
	return result;
}

/* Whether access is granted to something other than a GPU; what the driver does there with host memory is unknown. */
static bool to_others(const CUmemAccessDesc *desc, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc[i].location.id >= GG_ORDINALS)
			return true;
	return false;
}

WRAPPER cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
	struct object_range range;
	struct region_about about;
	CUresult result = CUDA_SUCCESS;

	PASS_INSIDE(cuMemSetAccess, (ptr, size, desc, count));
	if (region_about(ptr, &about))
		return CUDA_ERROR_INVALID_VALUE;
	range = object_claim_range(ptr, size);
	if (range.failed)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (desc && to_others(desc, count)) {
		CUstreamCaptureMode mode = driver_enter();

		for (size_t i = 0; i < range.count && result == CUDA_SUCCESS; i++)
			result = pin_whole(range.views[i]->region);
		driver_leave(mode);
	}
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuMemSetAccess, (ptr, size, desc, count));
	pthread_mutex_lock(&tree_lock);
	for (size_t i = 0; i < range.count && result == CUDA_SUCCESS; i++)
		view_set_access(range.views[i], ptr, size, desc, count);
	pthread_mutex_unlock(&tree_lock);
	object_put_range(&range);
	return result;
}

WRAPPER cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
	struct region *region;
	CUresult result;
	bool looks;

	PASS_INSIDE(cuMemGetAccess, (flags, location, ptr));
	looks = region_look(ptr);
	region = object_claim_at(ptr);	/* keeps it mapped during the call */
	CALL_REAL(result, cuMemGetAccess, (flags, location, ptr));
	if (region)
		object_put(region);
	if (looks)
		gate_leave();
	return result;
}

FORWARD(cuMemAddressReserve,
	(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
	 unsigned long long flags),
	(ptr, size, alignment, addr, flags))

WRAPPER cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	struct region_about about;
	CUresult result;

	PASS_INSIDE(cuMemAddressFree, (ptr, size));
	if (region_about(ptr, &about))
		return CUDA_ERROR_INVALID_VALUE;
	CALL_REAL(result, cuMemAddressFree, (ptr, size));
	return result;
}
