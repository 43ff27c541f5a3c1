/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hints that the library gives the driver about managed memory: advice that has memory stay in the host and be used
 * there, or brings back what the program asked for; and prefetches. Whatever version of the entry points the driver
 * has.
 *
 * Within driver_enter, or ours_enter.
 */
#ifndef GGROUP_CUDA_HINT_H
#define GGROUP_CUDA_HINT_H

#include "shadow.h"

#define HINT_HOST ((CUmemLocation){ .type = CU_MEM_LOCATION_TYPE_HOST })

static inline CUmemLocation hint_gpu(const struct device *device)
{
	return (CUmemLocation){ .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal };
}

CUresult hint_advise(CUdeviceptr start, uint64_t bytes, CUmem_advise what, CUmemLocation location);
/* `stream` as the driver is to have it, `per_thread` where its 0 is the thread's own. */
CUresult hint_prefetch(CUdeviceptr start, uint64_t bytes, CUmemLocation location, CUstream stream, bool per_thread);

/* Have a range of the allocation stay in the host, and the device use it there. After an error it may do so in part. */
CUresult hint_keep(const struct shadow *shadow, CUdeviceptr start, uint64_t bytes, const struct device *device);
/* Have the program's own advice hold for the range again. */
CUresult hint_restore(const struct shadow *shadow, CUdeviceptr start, uint64_t bytes, const struct device *device);

#endif
