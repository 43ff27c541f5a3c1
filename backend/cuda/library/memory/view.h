/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the program has mapped an object (object.h). Each cuMemMap makes a view of a part of the object, which may have
 * several views, or none.
 *
 * Views and their list change under the lock of the tree, and only by a thread that has claimed the object. A thread
 * that has a chunk of it may read them without the lock.
 */
#ifndef GGROUP_CUDA_VIEW_H
#define GGROUP_CUDA_VIEW_H

#include "chunk.h"

/* The GPUs that may read and write at an address: one bit per ordinal. */
struct access {
	uint64_t read, write;
};

struct view {
	struct view *next;	/* of the same object */
	struct region *region;
	CUdeviceptr address;
	size_t bytes, offset;	/* the part of the region that is mapped */
	struct access access[];	/* one for each GG_CHUNK */
};

/* Returns a view that is not in the list yet; NULL without memory. */
struct view *view_new(struct region *region, CUdeviceptr address, size_t bytes, size_t offset);

/* The functions below need the lock of the tree. */

/* Adds a view to the list; false without memory. */
bool view_insert(struct view *view);
/* Takes a view off the list before the driver unmaps it: right after, another one may be mapped there. */
void view_hide(struct view *view);
/* view_show puts it back, if the driver has not unmapped it; view_remove takes it off its object otherwise, and does
 * not free it. */
void view_show(struct view *view);
void view_remove(struct view *view);
/* The view that holds `address`; NULL: none. */
struct view *view_at(CUdeviceptr address);
/* The first view that ends above `address`, and the view after another, by address; NULL: none. */
struct view *view_from(CUdeviceptr address);
struct view *view_after(const struct view *view);
/* Records the access that cuMemSetAccess has set on [address, address + bytes), where the view covers it. */
void view_set_access(struct view *view, CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count);
/* Calls `visit` for each range of addresses at which a part of a region is mapped. */
void view_each(struct region *region,
	       void (*visit)(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, void *),
	       void *argument);
/* The GPUs that may use any part of a region, or have copied to or from it, one bit per ordinal; the caller has a chunk
 * of it. */
uint64_t view_users(const struct region *region);
/* Notes that a GPU copies to or from [address, address + bytes): a copy needs no access of the GPU that makes it. Any
 * address; without the lock. */
void view_copied(CUdeviceptr address, size_t bytes, CUdevice by);
/* Returns the GPUs that may use the region at an address, as view_users does; without the lock. */
uint64_t view_users_at(CUdeviceptr address);
/* Whether another GPU, with turns of its own, may write to it. */
bool view_is_shared(const struct region *region);

#endif
