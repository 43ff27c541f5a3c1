/* SPDX-License-Identifier: Apache-2.0 */
/* Small allocations that share a chunk: regions of one chunk each, with a buddy system (small.h). */
#ifndef GGROUP_CUDA_PACKED_H
#define GGROUP_CUDA_PACKED_H

#include "chunk.h"

CUresult packed_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address);
/* The following with the lock held. packed_free frees the allocation at an offset; false for none. `empty`: the region
 * is off the list, and to be freed. */
bool packed_free(struct region *region, uint64_t offset, bool *empty);
void packed_enter(struct region *region);
void packed_leave(struct region *region);

#endif
