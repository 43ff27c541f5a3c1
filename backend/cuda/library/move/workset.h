/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When the working set of a program (order.h) is learnt, and what is told of it.
 *
 * At the end of each turn. A program that takes none runs as it does in a turn: what it uses in a second is looked at
 * every ten, or all the time where heat is wanted anyway. All of this is called by the listening thread.
 */
#ifndef GGROUP_CUDA_WORKSET_H
#define GGROUP_CUDA_WORKSET_H

#include "device.h"

/* Learns, if it is time; returns the milliseconds until it should be called again. Not `wanted`: the daemon does not ask
 * for it, and nothing is told. */
int64_t workset_tick(struct device *device, bool wanted);
/* A turn is over. */
void workset_turn_over(struct device *device);
/* Tells how things are now, if it is wanted. */
void workset_tell(struct device *device);

/* The daemon has had some of it come (PREPARE). */
void workset_prepared(struct device *device);
/* Whether it does so: then it knows what is to be there before the next turn, and nothing else moves meanwhile. */
bool workset_is_prepared(struct device *device);

#endif
