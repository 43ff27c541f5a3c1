/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The chunks of a batch are carried to their places: copied on the copy engine, and remapped, run by run;
 * while one run is remapped the next are copied. A context is borrowed (device_borrow).
 */
#ifndef GGROUP_CUDA_CARRY_H
#define GGROUP_CUDA_CARRY_H

#include "calm.h"
#include "chunk.h"

/* Chunks that move together at most. */
#define BATCH_MOST_CHUNKS CHUNKS_TOGETHER
/* Bytes of them, at least: what is begun with where it is not known what the driver takes. */
#define BATCH_LEAST (64 * GG_MIB)

/* Chunks on their way. */
struct batch {
	size_t count;
	bool in;			/* to the GPU */
	bool within;			/* from there, or from the host to the host: to memory that others can map,
					 * or */
	bool home;			/* ... to memory of our own, for what was imported, or */
	bool join;			/* ... to `joined`, which is to be behind all of an object */
	CUmemGenericAllocationHandle joined;
	struct pick pick[BATCH_MOST_CHUNKS];
	CUdeviceptr source[BATCH_MOST_CHUNKS];			/* where it can be copied from */
	size_t bytes[BATCH_MOST_CHUNKS];
	CUmemGenericAllocationHandle from[BATCH_MOST_CHUNKS];	/* behind it now */
	CUdeviceptr from_window[BATCH_MOST_CHUNKS];			/* of a chunk in the host */
	bool imported[BATCH_MOST_CHUNKS];				/* that chunk */
	bool whole[BATCH_MOST_CHUNKS];				/* `from` is behind all of the region */
	struct spare to[BATCH_MOST_CHUNKS];				/* `window`: where it can be copied to */
	bool moved[BATCH_MOST_CHUNKS];
	CUdeviceptr window;		/* in: of all the new chunks together */
	size_t window_bytes;
	CUdeviceptr sources;		/* of objects: a window of what is on the GPU, for they may be mapped nowhere */
	size_t sources_bytes;
};

struct mover {
	pthread_mutex_t lock;		/* one moves at a time; below the gate: its holder may close that */
	CUstream stream[2];
	CUevent event[BATCH_MOST_CHUNKS];
	uint64_t made_in;		/* device->contexts when those were made */
	uint64_t batch_bytes;		/* what is moved at a time */
	uint64_t copy_us;		/* for how long a copy is waited for: then it is left to itself */
	uint64_t work_us;		/* for how long what runs is waited for at first, while none of it ends */
	struct calm calm;		/* ... and how that went */
	uint64_t busy_us;		/* spent on moving, ever: not on waiting for the program */
	struct batch *stuck;		/* given up on, with copies that may still run */
};

/* Streams and events of ours in that context. */
CUresult carry_prepare(struct device *device);
/*
 * Copies and remaps a batch. The gate is closed, nothing runs, a context is borrowed. Marks what has moved;
 * false where copies may still be running: nothing of what has not moved may be touched then.
 */
bool carry(struct device *device, struct batch *batch);
/* Whether both our streams have come to their end. */
bool carry_idle(struct device *device);

#endif
