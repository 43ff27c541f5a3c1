/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations that share a chunk: regions of one chunk each, with a buddy system (small.h). */
#ifndef GGROUP_CUDA_PACKED_H
#define GGROUP_CUDA_PACKED_H

#include "chunk.h"

CUresult packed_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address);
/* The others: with the lock. Frees one, at an offset; false: there is none. `empty`: the region is to go,
 * and left the list. */
bool packed_free(struct region *region, uint64_t offset, bool *empty);
void packed_enter(struct region *region);
void packed_leave(struct region *region);

#endif
