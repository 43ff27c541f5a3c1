/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One direction of the bus: the chunks of a batch are copied to where they go, and remapped, run by run; while one run
 * is remapped the next are copied. What a run needs is made just before its copies are submitted, and no call of the
 * driver is about more than a run: what levers and other programs wait for the driver's lock is bounded by that
 * (place.h).
 */
#ifndef GGROUP_CUDA_LANE_H
#define GGROUP_CUDA_LANE_H

#include "calm.h"
#include "chunk.h"

/* Chunks that move together at most. */
#define BATCH_MOST_CHUNKS CHUNKS_TOGETHER
/* Bytes of them, at least: what is begun with where it is not known what the driver takes. */
#define BATCH_LEAST (64 * GG_MIB)
/* Runs of one direction whose copies are on their way, at most. */
#define LANE_AHEAD 16

/* Addresses of ours at which chunks are copied. What is mapped there lies side by side; it is unmapped in the same
 * order. */
struct window {
	CUdeviceptr address;	/* 0: there is none */
	size_t bytes;
	size_t gone, mapped;	/* something is mapped from the one to the other */
};

/* Chunks on their way. */
struct batch {
	size_t count;
	bool in;			/* to the GPU */
	bool within;			/* from there, or from the host to the host: to memory that others can map,
					 * or */
	bool home;			/* ... to memory of our own, for what was imported, or */
	bool join;			/* ... to `joined`, which is to be behind all of an object */
	bool instead;			/* in, in the place of what goes out meanwhile: in no books before that has
					 * gone */
	CUmemGenericAllocationHandle joined;
	struct pick pick[BATCH_MOST_CHUNKS];
	CUdeviceptr source[BATCH_MOST_CHUNKS];			/* where it can be copied from; 0: nowhere yet */
	size_t bytes[BATCH_MOST_CHUNKS];
	CUmemGenericAllocationHandle from[BATCH_MOST_CHUNKS];	/* behind it now */
	CUdeviceptr from_window[BATCH_MOST_CHUNKS];			/* of a chunk in the host */
	bool imported[BATCH_MOST_CHUNKS];				/* that chunk */
	bool whole[BATCH_MOST_CHUNKS];				/* `from` is behind all of the region */
	struct spare to[BATCH_MOST_CHUNKS];				/* `window`: where it can be copied to */
	bool moved[BATCH_MOST_CHUNKS];
	bool kept[BATCH_MOST_CHUNKS];				/* out: `to` is the copy that it had, with this mark: */
	struct mark mark[BATCH_MOST_CHUNKS];
	bool clean[BATCH_MOST_CHUNKS];				/* ... and equal to it, so that nothing is copied */
	bool marked[BATCH_MOST_CHUNKS];				/* in: what it came from is its copy, with that mark */
	/* It has moved, and nothing else has what it left. */
	bool settled[BATCH_MOST_CHUNKS];
	struct window window;		/* in: of the new chunks */
	struct window sources;		/* of objects: of what is on the GPU, for they may be mapped nowhere */
};

/* Of a batch: neighbours, which are remapped by one call. */
struct lane_run {
	size_t first, count;
	size_t bytes;
	size_t shown;	/* bytes at the window of sources */
};

struct lane {
	struct batch *batch;	/* NULL: nothing goes this way */
	struct lane_run run[BATCH_MOST_CHUNKS];
	size_t count;		/* of runs */
	size_t sent, landed;	/* of them: whose copies were submitted, that were remapped, or could not be */
	size_t ahead;		/* bytes between the two */
	uint64_t since;		/* when the first of those came to be the first, us */
	bool shut;		/* no more is sent */
	bool unsure;		/* a copy may be on its way that no event tells of */
	bool keeps;		/* what a run leaves is freed with the batch, for the driver has refused that before */
};

/* Streams of a mover: each way, and the kernel that makes marks, which waits for no copy. */
enum { MOVER_OUT, MOVER_IN, MOVER_MARKS, MOVER_STREAMS };

struct mover {
	pthread_mutex_t lock;		/* one moves at a time; below the gate: its holder may close that */
	CUstream stream[MOVER_STREAMS];
	CUevent event[2][LANE_AHEAD];
	struct lane lane[2];
	uint64_t made_in;		/* device->contexts when those were made */
	uint64_t batch_bytes;		/* what is moved at a time */
	uint64_t copy_us;		/* for how long a copy is waited for: then it is left to itself */
	uint64_t mark_us;		/* for how long marks are made at the end of a turn */
	uint64_t work_us;		/* for how long what runs is waited for at first, while none of it ends */
	struct calm calm;		/* ... and how that went */
	uint64_t busy_us;		/* spent on moving, ever: not on waiting for the program */
	uint64_t waited_us;		/* ... on that, and */
	uint64_t closed_us;		/* ... with the gate closed and nothing running; both by the holder of the
					 * lock */
	struct batch *stuck[2];		/* given up on, with copies that may still run */
};

/* One for a batch, or for NULL. */
void lane_begin(struct lane *lane, struct batch *batch);
/* Whether copies are on their way that are to land. */
bool lane_flies(const struct lane *lane);
/* Submits the copies of the next run, unless as much is on its way as may be, or it needs more of the GPU than `room`,
 * of which it takes what it needs; false: it did not. */
bool lane_send(struct device *device, struct lane *lane, uint64_t *room);
/* Remaps the first run on its way, if its copies have ended; false: they have not. With `room`: what it leaves of the
 * GPU is freed at once, and added to that. */
bool lane_land(struct device *device, struct lane *lane, uint64_t *room);

/* Marks the chunks of the next run, for the gap between two turns that the program is in, while kernels of ours run
 * still; false: there are no more, or it cannot be. */
bool lane_mark(struct device *device, struct lane *lane);

/* The end of a chunk that has moved: it is in its new place by the books of the regions, and what it was in is freed,
 * or kept for others. Once. */
void lane_settle(struct device *device, struct batch *batch, size_t i);
/* The end of a window; nothing is copied there any more. */
void lane_drop(struct window *window);

#endif
