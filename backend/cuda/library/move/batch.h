/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks that move together: copied, remapped, and put in their places. The steps of mover.c; whoever calls these has
 * mover->lock.
 */
#ifndef GGROUP_CUDA_BATCH_H
#define GGROUP_CUDA_BATCH_H

#include "device.h"
#include "region.h"

/* Chunks that move together at most. */
#define BATCH_MOST_CHUNKS 512
/* Bytes of them, at least: what is begun with where nobody knows what the driver takes. */
#define BATCH_LEAST (64 * GG_MIB)

/* Chunks on their way. */
struct batch {
	size_t count;
	bool in;			/* to the GPU */
	bool within;			/* from there, or from the host to the host: to memory that others can map, or */
	bool home;			/* ... to memory of our own, for what was imported */
	struct pick pick[BATCH_MOST_CHUNKS];
	CUdeviceptr address[BATCH_MOST_CHUNKS];
	size_t bytes[BATCH_MOST_CHUNKS];
	CUmemGenericAllocationHandle from[BATCH_MOST_CHUNKS];	/* behind the address now */
	CUdeviceptr from_window[BATCH_MOST_CHUNKS];			/* of a chunk in the host */
	bool imported[BATCH_MOST_CHUNKS];				/* that chunk */
	struct spare to[BATCH_MOST_CHUNKS];				/* `window`: where it can be copied to */
	bool moved[BATCH_MOST_CHUNKS];
	CUdeviceptr window;		/* in: of all the new chunks together */
	size_t window_bytes;
};

struct mover {
	pthread_mutex_t lock;		/* one moves at a time; below the gate: who holds it may close that */
	CUstream stream[2];
	CUevent event[BATCH_MOST_CHUNKS];
	uint64_t made_in;		/* device->contexts when those were made */
	uint64_t batch_bytes;		/* what is moved at a time */
	uint64_t busy_us;		/* spent on moving, ever: not on waiting for the program */
	struct batch *stuck;		/* given up on, with copies that may still run */
};

/* Of what the regions have at each pick. NULL without memory. */
struct batch *batch_new(bool in, const struct pick *picks, size_t count);
/* To the host: for as many of the picks as chunks of the host are found for, the others are let go. NULL: for none. */
struct batch *batch_new_out(struct device *device, const struct pick *picks, size_t count);
enum chunk_class batch_class(const struct batch *batch, size_t i);
/* Moves a batch that has all it needs; returns the bytes that moved. Frees it. */
uint64_t batch_move(struct device *device, struct batch *batch);
/* The new chunks of the GPU, of which `mapped` bytes are mapped at the window, are not from now on. */
void batch_drop_window(struct batch *batch, size_t mapped);
/* With the gate closed: waits until nothing runs. A program may have a second's worth of kernels in its queue: while
 * those get done it loses nothing by having the gate closed. */
bool batch_quiet(struct device *device);
/* Lets go of the batch that was given up, if it has come to its end; whether there is none any more. */
bool batch_reap(struct device *device);

#endif
