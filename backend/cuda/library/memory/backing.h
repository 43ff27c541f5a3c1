/* SPDX-License-Identifier: Apache-2.0 */
/* The backing of a region: reserved addresses, and chunks of the GPU that are mapped there. */
#ifndef GGROUP_CUDA_BACKING_H
#define GGROUP_CUDA_BACKING_H

#include "chunk.h"

/* Make a region that no thread can find yet: backed, charged, in the current context; all or nothing. Waits for the
 * daemon. */
CUresult backing_make(struct device *device, size_t bytes, size_t alignment, struct region **made);
/* Return a region with the chunks for `bytes`, and nothing behind them; NULL without memory. */
struct region *backing_plan(struct device *device, size_t bytes);
/* Unmap all of a region; false: it is still mapped. */
bool backing_unmap(struct region *region);
/* Give back the addresses of a region that is mapped nowhere, and that no thread can find any more. */
void backing_unreserve(const struct region *region);
/* Give back the addresses and the chunks of such a region, and free it. */
void backing_return(struct region *region);
/* Give back the chunks of a region without addresses, and free it. */
void backing_give(struct region *region);

#endif
