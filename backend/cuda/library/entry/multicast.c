// SPDX-License-Identifier: Apache-2.0
/* Multicast objects: memory bound to one stays where it is, and stays charged while it is bound (binding.h). */

#include "driver.h"
#include "foreign.h"
#include "handle.h"
#include "names.h"
#include "pin.h"
#include "region.h"
#include "wrapper.h"

/* An object that was exported lives until other processes have released it, too, which cannot be seen here. Memory
 * bound to it then stays charged until it is unbound. */
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

/* Records the `result` of the driver's bind. */
static void settle(struct binding *binding, CUresult result, CUmemGenericAllocationHandle object, size_t offset,
		   size_t size)
{
	const struct binding_box box = box_of(binding_ordinal(binding), offset, size);

	if (result != CUDA_SUCCESS) {
		binding_drop(binding);
		return;
	}
	binding_enter(binding, foreign_multicast(object), NULL, &box);
	foreign_share();
}

WRAPPER cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
			   CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
			   unsigned long long flags)
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

/* Binds memory at one address: a single piece to the driver, or memory unknown to the library. */
static CUresult bind_piece(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t size,
			   unsigned long long flags)
{
	struct binding *binding = binding_new();
	CUresult result;

	if (!binding)
		return CUDA_ERROR_OUT_OF_MEMORY;
	binding_hold_address(binding, address);
	CALL_REAL(result, cuMulticastBindAddr, (names_real(object), offset, address, size, flags));
	settle(binding, result, object, offset, size);
	return result;
}

/* Unbinds by the same calls as it was bound: one call per piece for memory of the library. */
static CUresult unbind(CUmemGenericAllocationHandle object, CUdevice ordinal, size_t offset, size_t size)
{
	const uint64_t holder = foreign_multicast(object);
	const struct binding_box box = box_of(ordinal, offset, size);
	struct binding_box piece = box;
	CUresult result = CUDA_SUCCESS;
	bool any = false;

	while (result == CUDA_SUCCESS && (binding_find(holder, &box, &piece) || !any)) {
		CALL_REAL(result, cuMulticastUnbind,
			  (names_real(object), ordinal, piece.from[0], piece.to[0] - piece.from[0]));
		if (result == CUDA_SUCCESS)
			binding_clear(holder, &piece);
		any = true;
	}
	return result;
}

/* Binds all or nothing: an allocation of the library has several pieces, and the driver binds one at a time. */
static CUresult bind_pieces(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t size,
			    unsigned long long flags, int ordinal)
{
	CUresult result = CUDA_SUCCESS;
	size_t done = 0, piece;

	while (result == CUDA_SUCCESS && done < size) {
		piece = region_piece(address + done);
		if (!piece || piece > size - done)
			piece = size - done;
		result = bind_piece(object, offset + done, address + done, piece, flags);
		done += result == CUDA_SUCCESS ? piece : 0;
	}
	if (result != CUDA_SUCCESS && done)
		unbind(object, ordinal, offset, done);
	return result;
}

WRAPPER cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset, CUdeviceptr memptr, size_t size,
			    unsigned long long flags)
{
	struct region_about about;
	CUstreamCaptureMode mode;
	CUresult result;
	bool ours;

	PASS_INSIDE(cuMulticastBindAddr, (mcHandle, mcOffset, memptr, size, flags));
	ours = region_about(memptr, &about);
	mode = driver_enter();
	result = ours ? pin_range(memptr, size) : pin_objects(memptr, size);
	driver_leave(mode);
	if (result != CUDA_SUCCESS)
		return result;
	return ours ? bind_pieces(mcHandle, mcOffset, memptr, size, flags, about.device->ordinal) :
		      bind_piece(mcHandle, mcOffset, memptr, size, flags);
}

WRAPPER cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset, size_t size)
{
	PASS_INSIDE(cuMulticastUnbind, (mcHandle, dev, mcOffset, size));
	return unbind(mcHandle, dev, mcOffset, size);
}
