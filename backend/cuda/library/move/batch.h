/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks that move together: copied, remapped, and put in their places. The steps of mover.c; their callers have
 * mover->lock.
 */
#ifndef GGROUP_CUDA_BATCH_H
#define GGROUP_CUDA_BATCH_H

#include "carry.h"
#include "chunk.h"
#include "device.h"

/* Of what the regions have at each pick. NULL without memory. */
struct batch *batch_new(bool in, const struct pick *picks, size_t count);
/* To the host: for as many of the picks as chunks of the host are found for, the others are let go. NULL: for none. */
struct batch *batch_new_out(struct device *device, const struct pick *picks, size_t count);
/* One that is not to move after all: nothing was made for it. */
void batch_free(struct batch *batch);
enum chunk_class batch_class(const struct batch *batch, size_t i);
/* Moves a batch that has all it needs; returns the bytes that moved. Frees it. */
uint64_t batch_move(struct device *device, struct batch *batch);
/* Moves two at once: what comes, which is in no books, has the room that the other leaves. Returns the bytes that came; as many
 * of those that went are as they were in the books, and more that went are credit. Frees both. */
uint64_t batch_exchange(struct device *device, struct batch *out, struct batch *in);
/* Marks what a batch has, of batch_new, which does not move; with nothing of the program running, in a gap between two turns.
 * False: no more can be marked. */
bool batch_mark(struct device *device, struct batch *batch);
/* One made by batch_new_out that is not to move after all. Frees it. */
void batch_cancel(struct device *device, struct batch *batch);
/* Lets go of the batch that was given up, if it has come to its end; whether there is none any more. */
bool batch_reap(struct device *device);

#endif
