/* SPDX-License-Identifier: Apache-2.0 */
/* The stream-ordered allocations, and those of them that streams have freed. */
#ifndef GGROUP_CUDA_PARKED_H
#define GGROUP_CUDA_PARKED_H

#include "device.h"
#include "table.h"

/* What a stream frees and does not ask for again is not kept beyond these, even if
 * nothing else is allocated. */
#define PARKED_MOST 1024

/* What is allocated from a pool that we serve, and what streams have freed of that, in bytes; and the most of it, ever. */
struct usage {
	CUmemoryPool pool;	/* NULL: the default one of a device */
	uint64_t used, parked;
	uint64_t used_high, reserved_high;
	size_t blocks;		/* that are of it */
	bool gone;		/* the program has destroyed the pool */
};

enum block_state { BLOCK_NEW, BLOCK_USED, BLOCK_PARKED };

struct block {
	struct block *next;	/* while parked: the oldest first */
	struct device *device;
	CUdeviceptr address;
	size_t bytes;		/* rounded: what it may be used again for */
	struct usage *usage;	/* NULL: it is of no pool, and was freed while that could not be waited for */
	enum block_state state;	/* as it is counted there */
	bool parked;
	bool later;		/* behind everything: no event */
	uint64_t stream;	/* its number, where it was freed; 0: not known */
	CUcontext context;	/* of the event */
	CUevent event;
};

extern pthread_mutex_t parked_lock;
extern struct table parked_blocks;	/* under it: in use and parked, by address */

/* A block is of that pool from now on, or (NULL) of none any more, since it is free; it is used, or parked. With the lock. */
void block_of(struct block *block, struct usage *usage);
void block_is(struct block *block, enum block_state state);

/* How many are parked, for a look without the lock. */
size_t parked_count(void);
/* Parked (parked.c). With the lock. */
void parked_put(struct block *block);
/* Takes out of the list the first for which `wanted` says so; NULL: there is none. */
struct block *parked_take(bool (*wanted)(const struct block *, const void *), const void *argument);

/* Frees what has come to its turn, on every device; `wait`: waits for the rest too. */
void parked_sweep(bool wait);

#endif
