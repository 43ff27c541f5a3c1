/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream-ordered allocations (cuMemAllocAsync): elastic ones, and when they may be freed.
 *
 * What a stream frees is parked, with an event behind it. The same stream may have it back at once,
 * for what it does comes later; it is freed for good when an allocation or a free finds that the
 * event has happened. No thread waits for that.
 */
#ifndef GGROUP_CUDA_ASYNC_H
#define GGROUP_CUDA_ASYNC_H

#include "device.h"

/* Memory that may be used at once, by anybody, as it may be in the driver's own. */
CUresult async_alloc(struct device *device, size_t bytes, CUstream stream, bool per_thread,
		     CUdeviceptr *address);
/* CUDA_ERROR_NOT_FOUND: not one of these, ask the driver. */
CUresult async_free(CUdeviceptr address, CUstream stream, bool per_thread);
/* It is to be freed by cuMemFree, which has waited. False: it was freed already.
 * Others than these: true. */
bool async_take(CUdeviceptr address);
/* Whether it is one of these. */
bool async_is(CUdeviceptr address);
/* Something that cannot be waited for now, as a stream is being captured, is freed later.
 * False without memory. */
bool async_later(struct device *device, CUdeviceptr address);

/* Bytes in use on `device`, and parked. */
void async_usage(struct device *device, uint64_t *used, uint64_t *parked);
#endif
