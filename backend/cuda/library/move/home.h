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

#include "device.h"

/* From now on what is imported of a device is to come, from another GPU than that of the program, or from the same. */
void home_awaits(struct device *device, bool far);
/* Brings some of it home, unless the driver is busy: whoever moved us may be giving up its contexts, and each call takes
 * 10 ms or more then (docs/nvidia.md), of which a batch makes dozens with the gate closed. Returns the ms after which it is to be
 * called again, 0 for at once; -1 where there is nothing more, or something else keeps it from coming. */
int64_t home_some(struct device *device);
/* All of it, if that does not take long. */
void home_all(struct device *device);
#endif
