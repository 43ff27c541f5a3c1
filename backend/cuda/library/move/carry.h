/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Carries memory to the host and from it at the same time: one lane each way (lane.h), in one thread, as the driver
 * does one thing at a time for a process. The context is borrowed (device_borrow).
 */
#ifndef GGROUP_CUDA_CARRY_H
#define GGROUP_CUDA_CARRY_H

#include "lane.h"

/* Creates the library's streams and events in that context. */
CUresult carry_prepare(struct device *device);
/*
 * Copies and remaps one batch or two. What comes in takes the room of what has gone out by then, and no more. The gate
 * is closed, nothing runs, a context is borrowed. Marks what has moved. False: copies may still be running, and nothing
 * that has not moved may be touched.
 */
bool carry(struct device *device, struct batch *out, struct batch *in);
/* Waits until all streams of the library are idle, for as long as for a copy; false: they are not. */
bool carry_awaits(struct device *device);
/* Whether all streams of the library are idle. */
bool carry_idle(struct device *device);

#endif
