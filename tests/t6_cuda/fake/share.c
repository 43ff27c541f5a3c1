// SPDX-License-Identifier: Apache-2.0
/* Memory that something but the program gets at: multicast objects, and addresses that others are given. */
#include "memory.h"

#include <stdlib.h>
#include <sys/mman.h>

#define GRANULE (UINT64_C(2) << 20)

/* What is bound to a multicast object: by a handle, or where that is mapped. */
struct binding {
	struct binding *next;
	CUmemGenericAllocationHandle object;
	size_t offset, bytes;
	struct memory *memory;	/* NULL: by its address */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct binding *bindings;

FAKE_EXPORT cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
	FAKE(cuMulticastCreate);
	if (!prop->numDevices || !prop->size || prop->size % GRANULE)
		return CUDA_ERROR_INVALID_VALUE;
	*handle = fake_memory_multicast(prop->size);
	return CUDA_SUCCESS;
}

/* Dies where it is no handle. */
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

static CUresult bind(CUmemGenericAllocationHandle object, size_t offset, struct memory *memory, size_t bytes)
{
	struct binding *binding = malloc(sizeof(*binding));

	if (!binding || (offset | bytes) % GRANULE)
		fake_die("a binding of %zu bytes", bytes);
	pthread_mutex_lock(&lock);
	*binding = (struct binding){ bindings, object, offset, bytes, memory };
	bindings = binding;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMulticastBindMem(CUmemGenericAllocationHandle object, size_t offset, CUmemGenericAllocationHandle handle,
			       size_t from, size_t bytes, unsigned long long flags)
{
	FAKE(cuMulticastBindMem);
	(void)flags;
	check(object, "cuMulticastBindMem");
	return bind(object, offset, fake_memory_keep(handle, from, bytes, "cuMulticastBindMem"), bytes);
}

FAKE_EXPORT cuMulticastBindAddr(CUmemGenericAllocationHandle object, size_t offset, CUdeviceptr address, size_t bytes,
				unsigned long long flags)
{
	FAKE(cuMulticastBindAddr);
	(void)flags;
	check(object, "cuMulticastBindAddr");
	if (!fake_memory_known(address, bytes, "cuMulticastBindAddr"))
		return CUDA_ERROR_INVALID_VALUE;
	return bind(object, offset, NULL, bytes);
}

FAKE_EXPORT cuMulticastUnbind(CUmemGenericAllocationHandle object, CUdevice device, size_t offset, size_t bytes)
{
	struct binding **at = &bindings, *found;

	FAKE(cuMulticastUnbind);
	(void)device;
	check(object, "cuMulticastUnbind");
	pthread_mutex_lock(&lock);
	while ((found = *at) && (found->object != object || found->offset != offset || found->bytes != bytes))
		at = &found->next;
	if (found)
		*at = found->next;
	pthread_mutex_unlock(&lock);
	if (found && found->memory)
		fake_memory_let_go(found->memory);
	free(found);
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* What it names is not looked at any more. */
FAKE_EXPORT cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes, CUmemRangeHandleType type,
					  unsigned long long flags)
{
	FAKE(cuMemGetHandleForAddressRange);
	if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags ||
	    !fake_memory_known(address, bytes, "cuMemGetHandleForAddressRange"))
		return CUDA_ERROR_INVALID_VALUE;
	*(int *)handle = memfd_create("fake-gpu-dma-buf", MFD_CLOEXEC);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
	FAKE(cuPointerSetAttribute);
	if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !fake_memory_known(address, 1, "cuPointerSetAttribute"))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}
