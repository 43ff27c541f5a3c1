/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The chunks of a batch are carried to their places: copied on the copy engine, and remapped, run by run;
 * while one run is remapped the next are copied. A context is borrowed (device_borrow).
 */
#ifndef GGROUP_CUDA_CARRY_H
#define GGROUP_CUDA_CARRY_H

#include "batch.h"

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
