// SPDX-License-Identifier: Apache-2.0
#include "handle.h"

#include "driver.h"
#include "names.h"
#include "object.h"
#include "pin.h"

CUresult handle_give(CUmemGenericAllocationHandle *handle, bool again)
{
	const CUmemGenericAllocationHandle name = names_give(*handle, again);
	CUresult ignored;

	if (name) {
		*handle = name;
		return CUDA_SUCCESS;
	}
	CALL_REAL(ignored, cuMemRelease, (*handle));
	(void)ignored;
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult handle_fix(CUmemGenericAllocationHandle handle, CUmemGenericAllocationHandle *real, struct binding *binding)
{
	const CUstreamCaptureMode mode = driver_enter();
	struct region *region = object_claim(handle);
	CUresult result = CUDA_SUCCESS;

	if (region) {
		result = pin_whole(region);
		*real = region->object->whole;
		if (result == CUDA_SUCCESS && binding)
			binding_hold_object(binding, region);
		object_put(region);
	} else {
		*real = names_real(handle);
		if (binding)
			binding_hold_handle(binding, handle);
	}
	driver_leave(mode);
	return result;
}
