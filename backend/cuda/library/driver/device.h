/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of each GPU that the program uses, and of the contexts on it. */
#ifndef GGROUP_CUDA_DEVICE_H
#define GGROUP_CUDA_DEVICE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "api.h"

#define GG_MIB (UINT64_C(1) << 20)
/* What moves, and is charged, together: the granularity of CUDA's virtual memory management, 2 MiB on
 * every GPU so far. */
#define GG_CHUNK (2 * GG_MIB)
#define GG_DEVICES 16
/* The driver shows at most this many GPUs to a process (MIG slices included). */
#define GG_ORDINALS 64

struct region_tree;	/* memory/tree.h */
struct pool;		/* memory/kept.h */
struct quiet;		/* driver/quiet.h */
struct mover;		/* move/batch.h */

/* One GPU that the program uses. Made at the first context, or cuMemCreate, on it, never freed but by fork. */
struct device {
	CUdevice ordinal;	/* as this program numbers them */
	CUuuid uuid;
	/* The first context that used it: what our own calls are made in, between device_borrow and
	 * device_return. NULL once it is destroyed, until another uses the device. */
	CUcontext primary;
	uint64_t contexts;	/* how often that changed: streams and events made under another number are gone */
	pthread_rwlock_t in_use; /* read: borrowed; written: the context is being destroyed */
	uint64_t mark_every;	/* atomically: kernels in a stream behind which there is a marker;
				 * 0: by time alone (marker.h) */
	int host_node;		/* NUMA node for pinned host memory */
	int index;		/* as ggroupfs numbers them; -1 while no daemon manages it */
	bool elastic;		/* allocations are ours to place; false: all go to the driver (no VMM, by choice) */
	struct region_tree *regions;
	struct pool *pool;
	struct quiet *quiet;
	struct mover *mover;
	/* Bytes, atomically updated; multiples of GG_CHUNK; in gmem.stat. */
	uint64_t resident;	/* in chunks of the GPU, those cached in the pool included: what is charged */
	uint64_t swapped;	/* in pinned host chunks that serve the program */
	uint64_t foreign;	/* that cannot be moved: the program's own cuMemCreate, pools that are not ours,
				 * arrays */
	uint64_t managed;	/* in `resident`: managed memory that may be on the GPU; the driver counts it nowhere */
	uint64_t lent;		/* in `foreign`, and only by descriptors that others may have (lent.h) */
	uint64_t intact;	/* in objects that can move and have not yet: a checkpoint carries them */
	uint64_t exchanged;	/* bytes that came back in the place of others, ever (exchange.c) */
	uint64_t away;		/* bytes in `resident` that may be off the GPU just now: they change places */
	uint64_t clean;		/* in the host, of chunks that are on the GPU: copies of them (clean.h) */
	/* ... pinned of the host for this GPU (host.h), not in gmem.stat. */
	uint64_t host_held;	/* all of it */
	uint64_t host_used;	/* that serves the program, but for copies */
	uint64_t host_wanted;	/* that it would have, if it is granted that much */
};

/* The device of the current context, or of `ordinal`; set up on first use. NULL: not one that we manage. */
struct device *device_current(void);
/* Return the current context, without asking the driver: that of the calling thread's last device_current, which has
 * found a device. */
CUcontext device_context(void);
struct device *device_of(CUdevice ordinal);
/* device_of, where memory is about to be made on it: set up without a context, too. */
struct device *device_for_memory(CUdevice ordinal);
/* Which GPU a device is, by the driver; false: it does not say. */
bool device_uuid(CUdevice ordinal, CUuuid *uuid);
/* Asks the driver which GPU a device is: after a checkpoint it may be another one. Whether it is. */
bool device_identify(struct device *device);
/* From here to the other no device is set up; false, at once, while one is. By one thread. */
bool device_keep_all(void);
void device_let_all(void);
/* Calls `visit` for every device set up so far. */
void device_each(void (*visit)(struct device *, void *), void *argument);
/* Whether there is more than one. */
extern unsigned int device_number;	/* atomically: of those set up */
static inline bool device_several(void)
{
	return __atomic_load_n(&device_number, __ATOMIC_ACQUIRE) > 1;
}

/* Makes `primary` current in this thread (cuCtxPushCurrent) and keeps it alive; false, at once, where
 * there is none or it is being destroyed. Our own threads call the driver only between these two; they
 * come with ours_enter and ours_leave. */
bool device_borrow(struct device *device);
void device_return(struct device *device);

/* A context is being destroyed: from here to the other no thread borrows it. `gone`: it was. Taken before the
 * gate, which the mover may close while it borrows; device_borrow never waits, so there is no cycle. */
void device_context_ends(CUcontext context);
void device_context_ended(bool gone);
/* In between, once it is destroyed: it is no device's `primary` any more. */
void device_context_forgotten(CUcontext context);
/* A context was made: it may have the value of one that is destroyed, and whose end is not told everywhere yet.
 * Waits. */
void device_context_made(CUcontext context);

void device_forget(void);	/* in the child of fork() */

#endif
