/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes to the host and what comes from there are carried to their places at once: a lane each way (lane.h), in one
 * thread, as the driver does one thing of a process at a time. A context is borrowed (device_borrow).
 */
#ifndef GGROUP_CUDA_CARRY_H
#define GGROUP_CUDA_CARRY_H

#include "lane.h"

/* Streams and events of ours in that context. */
CUresult carry_prepare(struct device *device);
/*
 * Copies and remaps a batch, or two: what comes takes the place of what has gone by then, and no more than that. The
 * gate is closed, nothing runs, a context is borrowed. Marks what has moved; false where copies may still be running:
 * nothing of what has not moved may be touched then.
 */
bool carry(struct device *device, struct batch *out, struct batch *in);
/* Waits until all our streams have come to their end, for as long as a copy is waited for; false: they have not. */
bool carry_awaits(struct device *device);
/* Whether they have. */
bool carry_idle(struct device *device);

#endif
