/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What pool.c, host.c and keeper.c share: the chunks of a device that serve nobody, and the lock
 * they are under.
 */
#ifndef GGROUP_CUDA_KEPT_H
#define GGROUP_CUDA_KEPT_H

#include "pool.h"

/* What the GPU keeps for nobody is kept for at most that long. */
#define KEPT_MS 1000
/* A release that fails is tried again: it has no other way to fail than for a moment,
 * but a broken context. */
#define POOL_TRIES 3

struct kept {
	struct kept *next;
	struct spare spare;
	uint64_t since;		/* ms */
};

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t wake;
	bool thread;		/* there is one */
	bool making;		/* ... and it makes a chunk of the host */
	bool halted;		/* it is to make none, and none is kept */
	bool exportable;	/* chunks can be held by descriptors (departure.h), and shared (ipc.h) */
	struct kept *gpu[CLASSES];
	struct kept *host[CLASSES];
	uint64_t gpu_bytes;
	uint64_t host_bytes[CLASSES];
	uint64_t goal[CLASSES];	/* bytes to have ready in the host, or in use there */
	uint64_t used[CLASSES];	/* bytes of the host that serve the program */
	uint64_t peak[CLASSES];	/* the most of that */
	uint64_t credit;
	uint64_t limit;		/* the most to make ahead, or UINT64_MAX */
};

/* The newest of a list. With the lock; false: it is empty. */
bool kept_take(struct kept **list, struct spare *spare);
/* With the lock; false without memory. */
bool kept_put(struct kept **list, struct spare spare);

/* Physical memory of the GPU or the host, charged to nobody. */
CUresult pool_make(struct device *device, CUmemLocationType type, int id, uint64_t bytes,
		   CUmemGenericAllocationHandle *memory);
/* pool_trim, of what has been kept since `before` (ms) or earlier. */
uint64_t pool_trim_since(struct device *device, uint64_t keep_bytes, uint64_t before);

/* A new chunk of the host, mapped at its window. */
CUresult host_make(struct device *device, enum chunk_class class, struct spare *spare);

/* The thread, once there is something for it to do. With the lock. */
void keeper_wake(struct device *device);

#endif
