/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks that move together: copied, remapped, and entered in the books. The steps of mover.c; callers hold
 * mover->lock.
 */
#ifndef GGROUP_CUDA_BATCH_H
#define GGROUP_CUDA_BATCH_H

#include "carry.h"
#include "chunk.h"
#include "device.h"

/* Makes a batch of what the regions have at each pick. NULL without memory. */
struct batch *batch_new(bool in, const struct pick *picks, size_t count);
/* Makes a batch to the host, of the picks for which host chunks are found; releases the others. NULL: of none. */
struct batch *batch_new_out(struct device *device, const struct pick *picks, size_t count);
/* Frees a batch that does not move after all, and for which nothing was made. */
void batch_free(struct batch *batch);
enum chunk_class batch_class(const struct batch *batch, size_t i);
/* Moves a batch that has all it needs, and frees it; returns the bytes moved. */
uint64_t batch_move(struct device *device, struct batch *batch);
/* Moves two batches at once: what comes in, which is in no books, takes the room that the other leaves. Returns the
 * bytes that came in. The books stay as they are for as many of the bytes that went out; the rest of these are credit.
 * Frees both. */
uint64_t batch_exchange(struct device *device, struct batch *out, struct batch *in);
/* Marks the chunks of a batch of batch_new, without moving them, in a gap between two turns with nothing of the program
 * running. False: no more can be marked. */
bool batch_mark(struct device *device, struct batch *batch);
/* Frees a batch of batch_new_out that does not move after all. */
void batch_cancel(struct device *device, struct batch *batch);
/* Frees the batch that was given up, if its copies have ended; returns whether there is none any more. */
bool batch_reap(struct device *device);

#endif
