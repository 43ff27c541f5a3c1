/* SPDX-License-Identifier: Apache-2.0 */
/* The regions of a device, and the lock they are under. */
#ifndef GGROUP_CUDA_TREE_H
#define GGROUP_CUDA_TREE_H

#include "chunk.h"

/* One for all devices: it is held for a few steps through lists, never over a call of the driver or the daemon. */
extern pthread_mutex_t tree_lock;
extern pthread_cond_t tree_idle;	/* something is no longer busy */

struct region_tree {
	struct region *ring;	/* where the CLOCK's hand is; NULL: none */
	size_t hand;		/* the next chunk of it */
	struct region *small;	/* those for small allocations */
	CUdevice peers[GG_DEVICES];
	size_t peer_count;
	uint64_t users;		/* atomically: those, a bit an ordinal */
	uint64_t peers_done;	/* a bit an index of these: what was there before has been given to it, too */
	uint64_t resident[CLASSES];	/* bytes on the GPU */
	uint64_t pinned;
	uint64_t imported;
	size_t frees;		/* under way: of what is no longer in the ring, too */
	/* Lets go of what the mover left for later because the GPU did not come to it: by mover.c. */
	void (*reap)(struct device *device);
	uint64_t missed, over;	/* bytes: used in the last turn and not in the working set before it; and the other way
				 * round */
	uint64_t ran;		/* microseconds for which the program ran while it was learnt what it uses */
	uint32_t usual;		/* heat of what is new: it is not known yet, and is as good as any */
};

/* Waits for a moment, or until something is no longer busy. With the lock, which is let go meanwhile. */
void tree_await(struct device *device);

/* No two allocations have the same; this was the last. With the lock. */
extern uint64_t tree_serials;
/* From now on it is found; false without memory. Without the lock. */
bool tree_insert(struct region *region);
/* From now on it is not. With the lock. */
void tree_remove(struct region *region);

/* Others are given a descriptor of a chunk that the caller has (lent.h). */
void tree_lend(struct region *region, int fd);

/* What is pinned changed by so much: the daemon hears of it. Without the lock. */
void tree_report_pinned(struct device *device, int64_t change);

/* Bytes of `device` in regions on the GPU that are pinned. */
uint64_t tree_pinned(struct device *device);

/* The access that a region has, for cuMemSetAccess; `access` has room for GG_DEVICES. Returns how many. */
size_t tree_access(const struct region *region, CUmemAccessDesc *access);

/* A chunk that is busy has moved: what is behind it now. */
void tree_moved(const struct pick *pick, enum chunk_place place, CUmemGenericAllocationHandle memory,
		  CUdeviceptr window);
/* ... and other processes can map it, or it was imported. */
void tree_shareable(const struct pick *pick);
void tree_imported(const struct pick *pick);
/* Whether anything of a device was. */
bool tree_has_imported(struct device *device);
/* The bytes on the GPU, by the class of their chunks. */
void tree_classes(struct device *device, uint64_t resident[CLASSES]);

#endif
