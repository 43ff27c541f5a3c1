/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What pool.c, host.c and keeper.c share: the chunks of a device that are unused, and the lock
 * they are under.
 */
#ifndef GGROUP_CUDA_KEPT_H
#define GGROUP_CUDA_KEPT_H

#include "chunk.h"

/* What the GPU keeps unused is kept for at most that long. */
#define KEPT_MS 1000
/* A release that fails is tried again: it has no other way to fail than for a moment,
 * but a broken context. */
#define KEPT_TRIES 3

struct kept {
	struct kept *next;
	struct spare spare;
	uint64_t since;		/* ms */
};

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t wake;
	bool thread;		/* there is one */
	void *(*look_after)(void *device);	/* what it does (keeper.c) */
	bool (*shed_copy)(struct device *device);	/* frees a copy, if there is one (clean.c) */
	bool making;		/* ... and it makes a chunk of the host */
	bool halted;		/* it is to make none, and none is kept */
	bool exportable;	/* chunks can be held by descriptors (departure.h), and shared (ipc.h) */
	struct kept *gpu[CLASSES];
	struct kept *host[CLASSES];
	uint64_t gpu_bytes;
	uint64_t host_bytes[CLASSES];
	uint64_t goal[CLASSES];	/* bytes to have ready in the host, or in use there */
	uint64_t used[CLASSES];	/* bytes of the host that serve the program, or are copies */
	uint64_t clean[CLASSES];	/* ... that are copies */
	uint64_t peak[CLASSES];	/* the most of that */
	uint64_t credit;
	uint64_t limit;		/* the most to make ahead, or UINT64_MAX */
	bool granted;		/* a daemon has said what may be had of the host */
	uint64_t grant;		/* ... bytes, what is in use included */
	uint64_t wanted;	/* the most that was to be ready, or in use, bytes */
	uint64_t made_us;	/* that chunks of the host took to be made which were not ready */
	uint64_t resident[CLASSES];	/* of each class, when that was last looked at */
};

/* The newest of a list. With the lock; false: it is empty. */
bool kept_take(struct kept **list, struct spare *spare);
/* With the lock; false without memory. */
bool kept_put(struct kept **list, struct spare spare);

/* The bytes of all classes. */
uint64_t kept_sum(const uint64_t bytes[CLASSES]);
/* Whether so many more bytes of the host may be pinned by what the daemon has granted, if it has. With the lock. */
bool kept_may(const struct pool *pool, uint64_t bytes);

/* Physical memory of the GPU or the host, charged to no program. */
CUresult kept_make(struct device *device, CUmemLocationType type, int id, uint64_t bytes,
		   CUmemGenericAllocationHandle *memory);
/* Frees one without a change to the books: they say already that it is gone. */
void kept_release(struct device *device, CUmemGenericAllocationHandle memory);
/* The thread, once there is something for it to do. With the lock. */
void kept_wake(struct device *device);

#endif
