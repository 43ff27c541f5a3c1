/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What was imported comes home, to chunks of our own.
 *
 * After a departure (departure.h) our chunks are mapped by what was imported from their descriptors: those of a GPU may be
 * on another one than the program, and none of them can be exported once more (measured: docs/nvidia.md). So each is copied
 * to a new one, bit by bit, while the program runs.
 */
#ifndef GGROUP_CUDA_HOME_H
#define GGROUP_CUDA_HOME_H

#include "state.h"

/* What is imported of a device is on another GPU than the program, or on the same. */
void home_is_far(struct device *device, bool far);
/* Brings some of it home; whether there is more of it, which nothing keeps from coming. */
bool home_some(struct device *device);
/* All of it, if that does not take long. */
void home_all(struct device *device);
void home_forget(void);		/* in the child of fork() */

#endif
