/* SPDX-License-Identifier: Apache-2.0 */
/* The backing of a region: reserved addresses, and chunks of the GPU that are mapped there. */
#ifndef GGROUP_CUDA_BACKING_H
#define GGROUP_CUDA_BACKING_H

#include "chunk.h"

/* Make a region that no thread can find yet: backed, charged, in the current context; all or nothing. Waits for the
 * daemon. */
CUresult backing_make(struct device *device, size_t bytes, size_t alignment, struct region **made);
/* A region with the chunks for `bytes`, and nothing behind them; NULL without memory. */
struct region *backing_plan(struct device *device, size_t bytes);
/* Unmaps all of it; false: it is still mapped. */
bool backing_unmap(const struct region *region);
/* Gives back the addresses of a region that is mapped nowhere, and that no thread can find any more. */
void backing_unreserve(const struct region *region);
/* ... and what is behind it; frees it. */
void backing_return(struct region *region);
/* ... of one that has no addresses. */
void backing_give(struct region *region);

#endif
