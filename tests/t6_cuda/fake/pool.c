// SPDX-License-Identifier: Apache-2.0
/* Pools: their attributes, and how they are shared; allocation from them is in memory.c. */
#include "memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

FAKE_EXPORT cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
	FAKE(cuMemPoolCreate);
	*pool = calloc(1, sizeof(**pool));
	(*pool)->device = props->location.id;
	(*pool)->shareable = props->handleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemPoolDestroy(CUmemoryPool pool)
{
	FAKE(cuMemPoolDestroy);
	if (pool->used)
		fake_die("cuMemPoolDestroy: %llu bytes in use", (unsigned long long)pool->used);
	free(pool);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes)
{
	FAKE(cuMemPoolTrimTo);
	(void)pool;
	(void)bytes;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
	FAKE(cuMemPoolGetAttribute);
	if (attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
		*(int *)value = 1;
	else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
		*(cuuint64_t *)value = pool->threshold;
	else
		*(cuuint64_t *)value = __atomic_load_n(&pool->used, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
	FAKE(cuMemPoolSetAttribute);
	if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
		pool->threshold = *(cuuint64_t *)value;
	else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH || attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
		return *(cuuint64_t *)value ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	return attribute <= CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_EXPORT cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	FAKE(cuMemPoolSetAccess);
	for (size_t i = 0; i < count; i++) {
		const uint64_t bit = UINT64_C(1) << map[i].location.id;

		if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || map[i].location.id >= fake_devices())
			fake_die("cuMemPoolSetAccess: location %d", map[i].location.id);
		if (map[i].location.id == pool->device && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			return CUDA_ERROR_INVALID_VALUE;
		pool->accessible &= ~bit;
		pool->read_only &= ~bit;
		pool->accessible |= map[i].flags ? bit : 0;
		pool->read_only |= map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? bit : 0;
	}
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
	const uint64_t bit = UINT64_C(1) << location->id;

	FAKE(cuMemPoolGetAccess);
	*flags = location->id != pool->device && !(pool->accessible & bit) ? CU_MEM_ACCESS_FLAGS_PROT_NONE :
		 pool->read_only & bit ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return CUDA_SUCCESS;
}

/* The descriptor names the device, which is all that an imported pool has of the original. */
FAKE_EXPORT cuMemPoolExportToShareableHandle(void *handle, CUmemoryPool pool, CUmemAllocationHandleType type,
					     unsigned long long flags)
{
	FAKE(cuMemPoolExportToShareableHandle);
	if (!pool->shareable || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_INVALID_VALUE;
	*(int *)handle = open("/dev/null", O_RDONLY | O_CLOEXEC);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type,
					       unsigned long long flags)
{
	FAKE(cuMemPoolImportFromShareableHandle);
	if (flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fcntl((int)(intptr_t)handle, F_GETFD) < 0)
		return CUDA_ERROR_INVALID_VALUE;
	*pool = calloc(1, sizeof(**pool));
	(*pool)->imported = true;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr ptr)
{
	CUmemoryPool pool = NULL;
	uint64_t bytes;

	FAKE(cuMemPoolExportPointer);
	bytes = fake_allocated(ptr, &pool);
	if (!bytes || !pool || !pool->shareable)
		return CUDA_ERROR_INVALID_VALUE;
	memset(data, 0, sizeof(*data));
	memcpy(data, &bytes, sizeof(bytes));
	return CUDA_SUCCESS;
}

/* Without the contents. */
FAKE_EXPORT cuMemPoolImportPointer(CUdeviceptr *ptr, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
	uint64_t bytes;

	FAKE(cuMemPoolImportPointer);
	memcpy(&bytes, data, sizeof(bytes));
	if (!pool->imported)
		return CUDA_ERROR_INVALID_VALUE;
	return fake_allocate(ptr, bytes, FAKE_IMPORTED, pool);
}
