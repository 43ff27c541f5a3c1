/* SPDX-License-Identifier: Apache-2.0 */
/* A table from an address to its region, and to how often it was used. */
#ifndef GGROUP_CUDA_PAGES_H
#define GGROUP_CUDA_PAGES_H

#include "chunk.h"

/* With the lock of the tree, except for the three functions at the end. The region at an address; NULL: none. */
struct region *pages_region(CUdeviceptr address);
/* Makes room for entries of [address, address + bytes); false without memory. */
bool pages_ready(CUdeviceptr address, size_t bytes);
/* Clears the uses of a range, for which there is room. */
void pages_fresh(CUdeviceptr address, size_t bytes);
/* Sets the entries at the addresses of `region` to `value`. */
void pages_set(const struct region *region, struct region *value);
/* How often an object that begins in a page was used since the last look. The page is one that pages_set has
 * entered. */
uint32_t pages_uses(CUdeviceptr address);
/* The same, as a look that starts the count again. If no object begins in the page, and `before`, which applies to the
 * page before it, is higher, returns that. */
uint32_t pages_look(CUdeviceptr address, uint32_t before);
/* Whether an object that begins in a page was used since the last pages_first. */
bool pages_used(CUdeviceptr address);
/* The number of its first use, lower for earlier uses; 0: none; or `before`, as above. Clears it. */
uint32_t pages_first(CUdeviceptr address, uint32_t before);

/* Whether an address may be in a region of the library; false is certain. Lock-free. */
bool pages_near(CUdeviceptr address);
/* Counts a use of [address, address + bytes), or of the object that begins around `address`. Any address; lock-free. */
void pages_use(CUdeviceptr address, size_t bytes);
void pages_use_from(CUdeviceptr address);

#endif
