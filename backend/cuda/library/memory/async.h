/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stream-ordered allocations (cuMemAllocAsync) of elastic memory, and the time when they may be freed.
 *
 * Memory that a stream frees is parked, with an event behind it. The same stream may have it back at once, since its
 * work comes later. It is freed for good when an allocation or a free finds that the event has happened. No thread
 * waits for that.
 */
#ifndef GGROUP_CUDA_ASYNC_H
#define GGROUP_CUDA_ASYNC_H

#include "device.h"

struct usage;

/* Allocate memory that any stream may use at once, as with the driver's own. `usage`: its pool; NULL for the default
 * one. */
CUresult async_alloc(struct device *device, struct usage *usage, size_t bytes, CUstream stream, bool per_thread,
		     CUdeviceptr *address);
/* Free an allocation. CUDA_ERROR_NOT_FOUND: it is none of these; ask the driver. */
CUresult async_free(CUdeviceptr address, CUstream stream, bool per_thread);
/* Take an allocation that cuMemFree, which has waited, is about to free. False: it was freed already. True also for
 * memory that is none of these. */
bool async_take(CUdeviceptr address);
/* Return whether an address is one of these allocations. */
bool async_is(CUdeviceptr address);
/* Get the pool of an allocation; NULL for the default one. False: it is none of these. */
bool async_pool(CUdeviceptr address, CUmemoryPool *pool);
/* Free memory later that cannot be waited for now, as a stream is being captured. False without memory. */
bool async_later(struct device *device, CUdeviceptr address);

/* Return the use of a device's default pool. */
struct usage *async_default(const struct device *device);
/* Return the use of a pool that the program has made; NULL without memory. */
struct usage *async_usage_new(CUmemoryPool pool);
/* Note that the program has destroyed the pool: its use goes with the last allocation from it. */
void async_usage_gone(struct usage *usage);
/* Return whether every allocation from it, if there were any, is free. */
bool async_usage_empty(const struct usage *usage);
/* Get an attribute of a pool that the library keeps, or reset a high mark to the current value. 0 for any other
 * attribute. */
uint64_t async_usage_get(const struct usage *usage, CUmemPool_attribute attribute);
void async_usage_reset(struct usage *usage, CUmemPool_attribute attribute);
#endif
