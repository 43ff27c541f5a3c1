/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's life, and what it keeps for each GPU that the program uses.
 */
#ifndef GGROUP_CUDA_STATE_H
#define GGROUP_CUDA_STATE_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL /* every version of every entry point, under its own name */
#endif
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define GG_MIB (UINT64_C(1) << 20)
/* What moves, and is charged, together: the granularity of CUDA's virtual memory management, 2 MiB on
 * every GPU so far. */
#define GG_CHUNK (2 * GG_MIB)
#define GG_DEVICES 16
/* The driver shows at most this many GPUs to a process (MIG slices included). */
#define GG_ORDINALS 64

struct region_tree;	/* memory/tree.h */
struct pool;		/* memory/kept.h */
struct mover;		/* move/batch.h */

/* One GPU that the program uses. Made at the first context on it, never freed but by fork. */
struct device {
	CUdevice ordinal;	/* as this program numbers them */
	CUuuid uuid;
	/* The first context that used it: what our own calls are made in, between state_borrow and
	 * state_return. NULL once it is destroyed, until another uses the device. */
	CUcontext primary;
	uint64_t contexts;	/* how often that changed: streams and events made under another number are gone */
	pthread_rwlock_t in_use; /* read: borrowed; written: the context is being destroyed */
	int host_node;		/* NUMA node for pinned host memory */
	int index;		/* as ggroupfs numbers them; -1 while no daemon manages it */
	bool elastic;		/* allocations are ours to place; false: all go to the driver (no VMM, by choice) */
	struct region_tree *regions;
	struct pool *pool;
	struct mover *mover;
	/* Bytes, atomically updated; multiples of GG_CHUNK. */
	uint64_t resident;	/* in chunks of the GPU, those cached in the pool included: what is charged */
	uint64_t swapped;	/* in pinned host chunks that serve the program */
	/* Bytes that cannot be moved, by reason; in gmem.stat. */
	uint64_t foreign;	/* the program's own cuMemCreate, native pools, arrays, managed memory */
	uint64_t exchanged;	/* bytes that came back in the place of others, ever (exchange.c) */
	uint64_t away;		/* bytes in `resident` that may be off the GPU just now: they change places */
};

/* The device of the current context, or of `ordinal`; set up on first use. NULL: not one that we manage. */
struct device *state_current_device(void);
struct device *state_device(CUdevice ordinal);
/* Asks the driver which GPU a device is: after a checkpoint it may be another one. Whether it is. */
bool state_identify(struct device *device);
/* From here to the other no device is set up; false, at once, while one is. By one thread. */
bool state_keep_devices(void);
void state_let_devices(void);
/* Calls `visit` for every device set up so far. */
void state_devices(void (*visit)(struct device *, void *), void *argument);

/* Makes `primary` current in this thread (cuCtxPushCurrent) and keeps it alive; false, at once, where
 * there is none or it is being destroyed. Our own threads call the driver only between these two; they
 * come with state_enter and state_leave. */
bool state_borrow(struct device *device);
void state_return(struct device *device);

/* A context is being destroyed: from here to the other nobody borrows it. `gone`: it was. Taken before the
 * gate, which the mover may close while it borrows; state_borrow never waits, so there is no cycle. */
void state_context_ends(CUcontext context);
void state_context_ended(bool gone);
/* In between, once it is destroyed: it is nobody's `primary` any more. */
void state_context_forgotten(CUcontext context);

/* Runs before the first entry point does anything, once a process: again in a child after fork(). It finds
 * the driver, and starts nothing: the thread and the socket are for the first device that is used
 * (daemon_begin). */
extern bool state_ready; /* atomically read and written */
void state_begin_slowly(void);
static inline void state_begin(void)
{
	if (!__atomic_load_n(&state_ready, __ATOMIC_ACQUIRE))
		state_begin_slowly();
}

/*
 * What state.c tells the others, each in the file of its name.
 *
 * setup: a device is used for the first time; its first context is current, `elastic` and `host_node` are
 * set; they may clear `elastic`. The daemon knows of the device only afterwards. context_gone: the context
 * was destroyed, and with it what the program allocated in it; called inside the gate, with possibly no
 * context current. `device->primary` is NULL already if it was that one. forget: in the child of fork():
 * every struct device is gone (leaked), no call of the driver may be made.
 */
CUresult region_setup(struct device *device);
CUresult pool_setup(struct device *device);
CUresult mover_setup(struct device *device);
void memory_context_gone(struct device *device, CUcontext context);
void memory_forget(void); /* memory.c: also for region.c, pool.c, mover.c */

/*
 * Whether the calling thread is one of ours, or in a call of ours into the driver: entry points that libcuda
 * calls on its own, and those that we call, pass straight through.
 */
extern __thread unsigned int state_depth;
static inline bool state_inside(void)
{
	return state_depth != 0;
}
static inline void state_enter(void)
{
	state_depth++;
}
static inline void state_leave(void)
{
	state_depth--;
}

/* CLOCK_MONOTONIC, in microseconds. */
uint64_t state_now_us(void);

/* One line on stderr, only with GGROUP_CUDA_LOG set in the environment. Never on stdout. */
void state_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
