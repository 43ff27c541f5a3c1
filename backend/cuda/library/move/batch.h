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
/* The new chunks of the GPU, of which `mapped` bytes are mapped at the window, are not from now on. */
void batch_drop_window(struct batch *batch, size_t mapped);
/* Lets go of the batch that was given up, if it has come to its end; whether there is none any more. */
bool batch_reap(struct device *device);

#endif
