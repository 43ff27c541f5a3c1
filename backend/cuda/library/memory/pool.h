/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Physical memory: chunks of the GPU, and pinned chunks of the host.
 *
 * A few freed chunks of the GPU are kept, so that a loop of cudaMalloc and cudaFree does not go to the kernel driver
 * each time; they stay charged, and are the first to go. Chunks of the host take long to make (0.3 s a GiB), so a
 * thread makes some ahead once they are likely to be needed, and they are kept after use. Each has a window: an address
 * of its own at which the copy engines reach it, for as long as it lives.
 *
 * The books (device->resident, device->swapped, and the daemon's) change here too.
 */
#ifndef GGROUP_CUDA_POOL_H
#define GGROUP_CUDA_POOL_H

#include "chunk.h"
#include "device.h"

/* The calls below need a current context of any device, or the device_borrow of it, unless they say otherwise. */

/* Get a chunk of the GPU that is charged already; false where none is kept. Makes no call of the driver. */
bool pool_cached(struct device *device, enum chunk_class class,
		 CUmemGenericAllocationHandle *memory);
/* Make a chunk that the caller has had charged. */
CUresult pool_create(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle *memory);
/* Take back a chunk that is mapped nowhere: keep it, or free and uncharge it. */
void pool_give(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle memory);
/* Free and uncharge a chunk that another process may still have mapped: it is not used again. */
void pool_drop(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle memory);
/* Free and uncharge all but `keep` bytes of what is kept on the GPU; returns the bytes freed. */
uint64_t pool_trim(struct device *device, uint64_t keep);
/* Do so for what has been kept since `before` (ms) or earlier. */
uint64_t pool_trim_since(struct device *device, uint64_t keep_bytes, uint64_t before);

/* Return the bytes kept on the GPU. */
uint64_t pool_kept(struct device *device);

/* Credit `bytes` that are resident in the books and still in the host: the daemon allowed them back (MOVE_IN) and they
 * have not been moved yet, or they were moved out and that is not booked yet. */
void pool_credit(struct device *device, uint64_t bytes);
/* Use up to `bytes` of the credit: they are where the books have them now. Returns the bytes used. */
uint64_t pool_spend(struct device *device, uint64_t bytes);
uint64_t pool_credited(struct device *device);
/* Uncharge `bytes` of chunks of the host that the program freed. */
void pool_uncharge_swapped(struct device *device, uint64_t bytes);
/* Uncharge `bytes` that were charged and are not used. */
void pool_uncharge(struct device *device, uint64_t bytes);

#endif
