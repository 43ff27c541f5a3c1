/* SPDX-License-Identifier: Apache-2.0 */
/* From an address to its region, and how often it was used. */
#ifndef GGROUP_CUDA_PAGES_H
#define GGROUP_CUDA_PAGES_H

#include "chunk.h"

/* With the lock of the tree, but the three at the end. */
struct region *pages_region(CUdeviceptr address);
/* Makes room for what is to be said of [address, address + bytes); false without memory. */
bool pages_ready(CUdeviceptr address, size_t bytes);
/* Nothing was used at these addresses yet, for which there is room. */
void pages_fresh(CUdeviceptr address, size_t bytes);
/* From now on, `value` is at the addresses of `region`. */
void pages_set(const struct region *region, struct region *value);
/* Of a page of a region that is set: how often something that begins in it was used since the last look. */
uint32_t pages_uses(CUdeviceptr address);
/* The look: the same, or `before`, which holds for the page before it, if that is more and nothing begins. Counts from
 * 0 again. */
uint32_t pages_look(CUdeviceptr address, uint32_t before);

/* Whether an address may be in one of ours: false is certain. Lock-free. */
bool pages_near(CUdeviceptr address);
/* Something used [address, address + bytes), or what begins around `address`. Any address; lock-free. */
void pages_use(CUdeviceptr address, size_t bytes);
void pages_use_from(CUdeviceptr address);

#endif
