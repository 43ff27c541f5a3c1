// SPDX-License-Identifier: Apache-2.0
#include "hint.h"

#include "driver.h"

CUresult hint_advise(CUdeviceptr start, uint64_t bytes, CUmem_advise what, CUmemLocation location)
{
	if (real.cuMemAdvise_v2)
		return real.cuMemAdvise_v2(start, bytes, what, location);
	if (!real.cuMemAdvise || location.type > CU_MEM_LOCATION_TYPE_HOST)
		return CUDA_ERROR_NOT_SUPPORTED;
	return real.cuMemAdvise(start, bytes, what,
				location.type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : location.id);
}

CUresult hint_prefetch(CUdeviceptr start, uint64_t bytes, CUmemLocation location, CUstream stream, bool per_thread)
{
	const CUdevice ordinal = location.type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : location.id;

	if (per_thread && real.cuMemPrefetchAsync_v2_ptsz)
		return real.cuMemPrefetchAsync_v2_ptsz(start, bytes, location, 0, stream);
	if (!per_thread && real.cuMemPrefetchAsync_v2)
		return real.cuMemPrefetchAsync_v2(start, bytes, location, 0, stream);
	if (location.type > CU_MEM_LOCATION_TYPE_HOST)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (per_thread && real.cuMemPrefetchAsync_ptsz)
		return real.cuMemPrefetchAsync_ptsz(start, bytes, ordinal, stream);
	return real.cuMemPrefetchAsync ? real.cuMemPrefetchAsync(start, bytes, ordinal, stream) :
	       CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult keep(CUdeviceptr start, uint64_t bytes, const struct advice *advice, const void *argument)
{
	const struct device *device = argument;
	CUresult result = CUDA_SUCCESS;

	if (advice->mostly_read)	/* each GPU that reads would have a copy */
		result = hint_advise(start, bytes, CU_MEM_ADVISE_UNSET_READ_MOSTLY, HINT_HOST);
	if (!result)
		result = hint_advise(start, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, HINT_HOST);
	return result ? result : hint_advise(start, bytes, CU_MEM_ADVISE_SET_ACCESSED_BY, hint_gpu(device));
}

CUresult hint_keep(const struct shadow *shadow, CUdeviceptr start, uint64_t bytes, const struct device *device)
{
	return shadow_each(shadow, start, start + bytes, keep, device);
}

static CUresult restore(CUdeviceptr start, uint64_t bytes, const struct advice *advice, const void *argument)
{
	const struct device *device = argument;
	const bool by = advice->by >> device->ordinal & 1;
	CUresult result = advice->prefers ?
		hint_advise(start, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, advice->preferred) :
		hint_advise(start, bytes, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, HINT_HOST);

	if (!result && !by)
		result = hint_advise(start, bytes, CU_MEM_ADVISE_UNSET_ACCESSED_BY, hint_gpu(device));
	if (!result && advice->mostly_read)
		result = hint_advise(start, bytes, CU_MEM_ADVISE_SET_READ_MOSTLY, HINT_HOST);
	return result;
}

CUresult hint_restore(const struct shadow *shadow, CUdeviceptr start, uint64_t bytes, const struct device *device)
{
	return shadow_each(shadow, start, start + bytes, restore, device);
}
