/* SPDX-License-Identifier: Apache-2.0 */
/* What region.c, pages.c and clock.c share: the regions of a device, and the lock they are under. */
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
};

/* Pages: from an address to its region, and its touched bit (pages.c). With the lock, but pages_touch and region_near. */
struct region *pages_region(CUdeviceptr address);
/* Makes room for what is to be said of a region; false without memory. */
bool pages_ready(const struct region *region);
/* From now on, `value` is at the addresses of `region`. */
void pages_set(const struct region *region, struct region *value);
/* Whether something in [start, start + bytes) was used since this was asked last. Of a region that is set. */
bool pages_touched(CUdeviceptr start, size_t bytes);
void pages_forget(void);

/* The chunk of a region that an offset is in. */
size_t chunk_at(const struct region *region, size_t offset);

#endif
