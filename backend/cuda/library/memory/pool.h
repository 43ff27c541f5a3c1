/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Physical memory: chunks of the GPU, and pinned chunks of the host.
 *
 * A few freed chunks of the GPU are kept, so that a loop of cudaMalloc and cudaFree does not go to
 * the kernel driver each time; they stay charged, and are the first to go. Chunks of the host take
 * long to make (0.3 s a GiB), so that a thread makes some ahead once it is likely that they will be
 * needed, and they are kept after use. Each of them has a window: an address of its own at which
 * the copy engines reach it, for as long as it lives.
 *
 * The books (device->resident, device->swapped, and the daemon's) change here too.
 */
#ifndef GGROUP_CUDA_POOL_H
#define GGROUP_CUDA_POOL_H

#include "chunk.h"
#include "device.h"

/* The calls below need a current context of any device, or the device_borrow of it, unless
 * they say otherwise. */

/* A chunk of the GPU that is charged already; false: none is kept. No call of the driver. */
bool pool_cached(struct device *device, enum chunk_class class,
		 CUmemGenericAllocationHandle *memory);
/* Makes one that the caller has had charged. */
CUresult pool_create(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle *memory);
/* Takes back one that is mapped nowhere: keeps it, or frees and uncharges it. */
void pool_give(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle memory);
/* Frees and uncharges one that somebody else may still have mapped: it is not used again. */
void pool_drop(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle memory);
/* Frees and uncharges what is kept on the GPU but `keep` bytes; returns the bytes. */
uint64_t pool_trim(struct device *device, uint64_t keep);
/* pool_trim, of what has been kept since `before` (ms) or earlier. */
uint64_t pool_trim_since(struct device *device, uint64_t keep_bytes, uint64_t before);

/* The bytes kept on the GPU. */
uint64_t pool_kept(struct device *device);

/* `bytes` are resident in the books, and in the host: the daemon lets them come back (MOVE_IN) and
 * they have not been moved yet, or they have been moved out and that is not booked yet. */
void pool_credit(struct device *device, uint64_t bytes);
/* Uses up to `bytes` of the credit: they are where the books have them now.
 * Returns what it used. */
uint64_t pool_spend(struct device *device, uint64_t bytes);
uint64_t pool_credited(struct device *device);
/* `bytes` of chunks of the host were freed by the program. */
void pool_uncharge_swapped(struct device *device, uint64_t bytes);
/* `bytes` that were charged are not used. */
void pool_uncharge(struct device *device, uint64_t bytes);

#endif
