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

struct usage;

/* Memory that may be used at once, by any stream, as it may be in the driver's own. `usage`: the pool that it is of; NULL: the
 * default one. */
CUresult async_alloc(struct device *device, struct usage *usage, size_t bytes, CUstream stream, bool per_thread,
		     CUdeviceptr *address);
/* CUDA_ERROR_NOT_FOUND: not one of these, ask the driver. */
CUresult async_free(CUdeviceptr address, CUstream stream, bool per_thread);
/* It is to be freed by cuMemFree, which has waited. False: it was freed already.
 * Others than these: true. */
bool async_take(CUdeviceptr address);
/* Whether it is one of these. */
bool async_is(CUdeviceptr address);
/* The pool that it is of; NULL: the default one. False: it is none of these. */
bool async_pool(CUdeviceptr address, CUmemoryPool *pool);
/* Something that cannot be waited for now, as a stream is being captured, is freed later.
 * False without memory. */
bool async_later(struct device *device, CUdeviceptr address);

/* What is counted of the default pool of a device. */
struct usage *async_default(const struct device *device);
/* The same of a pool that the program has made; NULL without memory. */
struct usage *async_usage_new(CUmemoryPool pool);
/* The program has destroyed the pool: it goes with the last allocation from it. */
void async_usage_gone(struct usage *usage);
/* Whether nothing is allocated from it, or was and is not free yet. */
bool async_usage_empty(const struct usage *usage);
/* An attribute of a pool, as far as we serve it; or that is set to what it is now. 0: it is another. */
uint64_t async_usage_get(const struct usage *usage, CUmemPool_attribute attribute);
void async_usage_reset(struct usage *usage, CUmemPool_attribute attribute);
#endif
