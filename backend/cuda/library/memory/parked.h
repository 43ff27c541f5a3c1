/* SPDX-License-Identifier: Apache-2.0 */
/* The stream-ordered allocations, and those of them that streams have freed. */
#ifndef GGROUP_CUDA_PARKED_H
#define GGROUP_CUDA_PARKED_H

#include "device.h"
#include "table.h"

/* What a stream frees and does not ask for again is not kept beyond these, even if
 * nothing else is allocated. */
#define PARKED_MOST 1024

struct block {
	struct block *next;	/* while parked: the oldest first */
	struct device *device;
	CUdeviceptr address;
	size_t bytes;		/* rounded: what it may be used again for */
	bool parked;
	bool later;		/* behind everything: no event */
	uint64_t stream;	/* its number, where it was freed; 0: not known */
	CUcontext context;	/* of the event */
	CUevent event;
};

extern pthread_mutex_t parked_lock;
extern struct table parked_blocks;	/* under it: in use and parked, by address */

/* How many are parked, for a look without the lock. */
size_t parked_count(void);
/* Parked (parked.c). With the lock. */
void parked_put(struct block *block);
/* Takes out of the list the first for which `wanted` says so; NULL: there is none. */
struct block *parked_take(bool (*wanted)(const struct block *, const void *), const void *argument);

/* Frees what has come to its turn, on every device; `wait`: waits for the rest too. */
void parked_sweep(bool wait);

#endif
