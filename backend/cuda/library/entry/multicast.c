// SPDX-License-Identifier: Apache-2.0
/* Multicast objects: the memory that is bound to one stays, and is charged as long as it is bound (binding.h). */

#include "driver.h"
#include "foreign.h"
#include "handle.h"
#include "names.h"
#include "pin.h"
#include "region.h"
#include "wrapper.h"

/* One that other processes may have goes when they let go of it, which is not seen: what is bound to it then stays charged
 * until it is unbound. */
WRAPPER cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop)
{
	CUresult result;

	PASS_INSIDE(cuMulticastCreate, (mcHandle, prop));
	CALL_REAL(result, cuMulticastCreate, (mcHandle, prop));
	if (result == CUDA_SUCCESS)
		result = handle_give(mcHandle, false);
	if (result == CUDA_SUCCESS)
		foreign_is_multicast(*mcHandle, names_next(), binding_clear_all);
	return result;
}

FORWARD(cuMulticastAddDevice, (CUmemGenericAllocationHandle mcHandle, CUdevice dev), (names_real(mcHandle), dev))

static struct binding_box box_of(int ordinal, size_t offset, size_t size)
{
	return (struct binding_box){ .kind = BINDING_MULTICAST, .level = (unsigned int)ordinal, .from = { offset },
				     .to = { offset + size } };
}

/* The driver has been asked to bind it, with that result. */
static void settle(struct binding *binding, CUresult result, CUmemGenericAllocationHandle object, size_t offset, size_t size)
{
	const struct binding_box box = box_of(binding_ordinal(binding), offset, size);

	if (result == CUDA_SUCCESS)
		binding_enter(binding, foreign_multicast(object), NULL, &box);
	else
		binding_drop(binding);
}

WRAPPER cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUmemGenericAllocationHandle memHandle,
			   size_t memOffset, size_t size, unsigned long long flags)
{
	struct binding *binding;
	CUresult result;

	PASS_INSIDE(cuMulticastBindMem, (mcHandle, mcOffset, memHandle, memOffset, size, flags));
	binding = binding_new();
	if (!binding)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = handle_fix(memHandle, &memHandle, binding);
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuMulticastBindMem,
			  (names_real(mcHandle), mcOffset, memHandle, memOffset, size, flags));
	settle(binding, result, mcHandle, mcOffset, size);
	return result;
}

WRAPPER cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size,
			    unsigned long long flags)
{
	struct region_about about;
	struct binding *binding;
	CUstreamCaptureMode mode;
	CUresult result;

	PASS_INSIDE(cuMulticastBindAddr, (mcHandle, mcOffset, memptr, size, flags));
	binding = binding_new();
	if (!binding)
		return CUDA_ERROR_OUT_OF_MEMORY;
	binding_hold_address(binding, memptr);
	mode = driver_enter();
	result = region_about(memptr, &about) ? pin_range(memptr, size) : pin_objects(memptr, size);
	driver_leave(mode);
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuMulticastBindAddr, (names_real(mcHandle), mcOffset, memptr, size, flags));
	settle(binding, result, mcHandle, mcOffset, size);
	return result;
}

WRAPPER cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size)
{
	const struct binding_box box = box_of(dev, mcOffset, size);
	CUresult result;

	PASS_INSIDE(cuMulticastUnbind, (mcHandle, dev, mcOffset, size));
	CALL_REAL(result, cuMulticastUnbind, (names_real(mcHandle), dev, mcOffset, size));
	if (result == CUDA_SUCCESS)
		binding_clear(foreign_multicast(mcHandle), &box);
	return result;
}
