/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the program has mapped an object (object.h): each mapping by cuMemMap is a view of a part of it. An object may
 * have several views, and none.
 *
 * Views and their list change under the lock of the tree, and only by a thread that has claimed the object: one that
 * has a chunk of it may read them without.
 */
#ifndef GGROUP_CUDA_VIEW_H
#define GGROUP_CUDA_VIEW_H

#include "chunk.h"

/* Which GPUs may read, and write, at an address: a bit an ordinal. */
struct access {
	uint64_t read, write;
};

struct view {
	struct view *next;	/* of the same object */
	struct region *region;
	CUdeviceptr address;
	size_t bytes, offset;	/* of the region, from there */
	struct access access[];	/* of each GG_CHUNK */
};

/* One that no thread finds yet; NULL without memory. */
struct view *view_new(struct region *region, CUdeviceptr address, size_t bytes, size_t offset);

/* The rest: with the lock. */

/* From now on it is found; false without memory. */
bool view_insert(struct view *view);
/* From now on it is not, since the driver is about to unmap it: as soon as it has, another may be mapped there. */
void view_hide(struct view *view);
/* ... but has not; or has: it is none of its object's any more, and not freed here. */
void view_show(struct view *view);
void view_remove(struct view *view);
/* The view that holds `address`; NULL: none does. */
struct view *view_at(CUdeviceptr address);
/* The first view that ends above `address`, and the one behind it, by their addresses; NULL: there is none. */
struct view *view_from(CUdeviceptr address);
struct view *view_after(const struct view *view);
/* What cuMemSetAccess has set on what it shares with [address, address + bytes). */
void view_set_access(struct view *view, CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count);
/* Calls `visit` for each address at which a part of a region is mapped. */
void view_each(struct region *region,
	       void (*visit)(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, void *),
	       void *argument);
/* The GPUs that may use any part of a region that one has a chunk of: a bit an ordinal. */
uint64_t view_users(const struct region *region);

#endif
