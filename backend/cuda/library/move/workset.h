/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the working set of a program (order.h) is learnt, and what is told of it.
 *
 * It is learnt at the end of each turn. A program without turns is treated as if it had them: its uses are looked at
 * for one second in ten, or all the time if heat is wanted anyway. All functions are called by the listening thread.
 */
#ifndef GGROUP_CUDA_WORKSET_H
#define GGROUP_CUDA_WORKSET_H

#include "device.h"

/* Learns if it is time; returns the milliseconds until the next call. Not `wanted`: the daemon does not ask for it, and
 * nothing is told. */
int64_t workset_tick(struct device *device, bool wanted);
/* A turn has ended. */
void workset_turn_over(struct device *device);
/* Tells the daemon the current figures, if wanted. */
void workset_tell(struct device *device);

/* The daemon has had some of the working set brought in (PREPARE). */
void workset_prepared(struct device *device);
/* Whether the daemon does so. It then knows what has to be there before the next turn, and nothing else moves
 * meanwhile. */
bool workset_is_prepared(struct device *device);

#endif
