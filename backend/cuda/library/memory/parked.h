/* SPDX-License-Identifier: Apache-2.0 */
/* The stream-ordered allocations, and those of them that streams have freed. */
#ifndef GGROUP_CUDA_PARKED_H
#define GGROUP_CUDA_PARKED_H

#include "device.h"
#include "table.h"

/* Most blocks that are kept after a stream freed them and did not ask for them again, even if nothing else is
 * allocated. */
#define PARKED_MOST 1024

/* Use of a pool that the library serves, in bytes: what is allocated from it, what streams have freed of that, and the
 * most of it ever. */
struct usage {
	CUmemoryPool pool;	/* NULL: the default pool of a device */
	uint64_t used, parked;
	uint64_t used_high, reserved_high;
	size_t blocks;		/* number of blocks of it */
	bool gone;		/* the program has destroyed the pool */
};

enum block_state { BLOCK_NEW, BLOCK_USED, BLOCK_PARKED };

struct block {
	struct block *next;	/* while parked, oldest first */
	struct device *device;
	CUdeviceptr address;
	size_t bytes;		/* rounded: the size that it may be used again for */
	struct usage *usage;	/* NULL: of no pool, freed while it could not be waited for */
	enum block_state state;	/* as it is counted in `usage` */
	bool parked;
	bool later;		/* to be freed after all work: it has no event */
	uint64_t stream;	/* number of the stream that freed it; 0: unknown */
	CUcontext context;	/* of the event */
	CUevent event;
};

extern pthread_mutex_t parked_lock;
extern struct table parked_blocks;	/* under that lock: blocks in use and parked, by address */

/* Make a block one of a pool, or, for NULL, of none, as it is free; set its state. With the lock held. */
void block_of(struct block *block, struct usage *usage);
void block_is(struct block *block, enum block_state state);

/* Return the number of parked blocks, also without the lock. */
size_t parked_count(void);
/* Park a block (parked.c). With the lock held. */
void parked_put(struct block *block);
/* Take the first block for which `wanted` returns true off the list; NULL for none. */
struct block *parked_take(bool (*wanted)(const struct block *, const void *), const void *argument);

/* Free parked blocks that are due, on every device; `wait`: wait for the rest, too. */
void parked_sweep(bool wait);

#endif
