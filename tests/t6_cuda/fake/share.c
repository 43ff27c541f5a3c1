// SPDX-License-Identifier: Apache-2.0
/* Memory that others than the program reach: multicast objects, and addresses that are handed out. */
#include "memory.h"

#include <sys/mman.h>

#define GRANULE (UINT64_C(2) << 20)

FAKE_EXPORT cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
	FAKE(cuMulticastCreate);
	if (!prop->numDevices || !prop->size || prop->size % GRANULE)
		return CUDA_ERROR_INVALID_VALUE;
	*handle = fake_memory_multicast(prop->size);
	return CUDA_SUCCESS;
}

/* Abort if it is no handle. */
static void check(CUmemGenericAllocationHandle object, const char *what)
{
	fake_memory_let_go(fake_memory_keep(object, 0, 0, what));
}

FAKE_EXPORT cuMulticastAddDevice(CUmemGenericAllocationHandle object, CUdevice device)
{
	FAKE(cuMulticastAddDevice);
	check(object, "cuMulticastAddDevice");
	return device < fake_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

FAKE_EXPORT cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle handle,
			       size_t from, size_t bytes, unsigned long long flags)
{
	FAKE(cuMulticastBindMem);
	return !flags && fake_memory_bind(object, offset, handle, from, bytes, "cuMulticastBindMem") ?
		       CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_EXPORT cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t bytes,
				unsigned long long flags)
{
	FAKE(cuMulticastBindAddr);
	return !flags && fake_memory_bind_at(object, offset, address, bytes, "cuMulticastBindAddr") ?
		       CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_EXPORT cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes)
{
	FAKE(cuMulticastUnbind);
	(void)device;
	return fake_memory_unbind(object, offset, bytes, "cuMulticastUnbind") ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The named memory is not looked at any more. */
FAKE_EXPORT cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type,
					  unsigned long long flags)
{
	FAKE(cuMemGetHandleForAddressRange);
	if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags ||
	    !fake_memory_known(address, bytes, "cuMemGetHandleForAddressRange"))
		return CUDA_ERROR_INVALID_VALUE;
	*(int *)handle = fake_number("FAKE_LENT", 0) ? fake_memory_lease(address, bytes) : -1;
	if (*(int *)handle < 0)
		*(int *)handle = memfd_create("fake-gpu-dma-buf", MFD_CLOEXEC);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
	FAKE(cuPointerSetAttribute);
	if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS ||
	    !fake_memory_known(address, 1, "cuPointerSetAttribute"))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}
