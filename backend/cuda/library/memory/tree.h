/* SPDX-License-Identifier: Apache-2.0 */
/* What region.c and its parts share: the regions of a device, and the lock they are under. */
#ifndef GGROUP_CUDA_TREE_H
#define GGROUP_CUDA_TREE_H

#include "region.h"

/* One for all devices: it is held for a few steps through lists, never over a call of the driver or the daemon. */
extern pthread_mutex_t region_lock;

struct region_tree {
	struct region *ring;	/* where the CLOCK's hand is; NULL: none */
	size_t hand;		/* the next chunk of it */
	struct region *small;	/* those for small allocations */
	CUdevice peers[GG_DEVICES];
	size_t peer_count;
	uint64_t resident[CLASSES];	/* bytes on the GPU */
	uint64_t pinned;
	uint64_t imported;
	size_t frees;		/* under way: of what is no longer in the ring, too */
	uint32_t usual;		/* heat of what is new: it is not known yet, and is as good as any */
};

/* Pages: from an address to its region, and how often it was used (pages.c). With the lock, but region_use
 * and the like. */
struct region *pages_region(CUdeviceptr address);
/* Makes room for what is to be said of a region; false without memory. */
bool pages_ready(const struct region *region);
/* From now on, `value` is at the addresses of `region`. */
void pages_set(const struct region *region, struct region *value);
/* Of a page of a region that is set: how often something that begins in it was used since the last look. */
uint32_t pages_uses(CUdeviceptr address);
/* The look: the same, or `before`, which holds for the page before it, where nothing begins. Counts from 0 again. */
uint32_t pages_look(CUdeviceptr address, uint32_t before);
void pages_forget(void);

/* The chunk of a region that an offset is in. */
size_t chunk_at(const struct region *region, size_t offset);

/* No two allocations have the same; this was the last. With the lock. */
extern uint64_t tree_serials;
/* From now on it is found; false without memory. Without the lock. */
bool tree_insert(struct region *region);

/* Allocations that share a chunk (packed.c). */
CUresult packed_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address);
/* The others: with the lock. Frees one, at an offset; false: there is none. `empty`: the region is to go,
 * and left the list. */
bool packed_free(struct region *region, uint64_t offset, bool *empty);
void packed_enter(struct region *region);
void packed_leave(struct region *region);

/* What is pinned changed by so much (pinned.c). Without the lock. */
void pinned_report(struct device *device, int64_t change);

#endif
