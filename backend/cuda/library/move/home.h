/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The homecoming of imported chunks, to chunks of the library's own.
 *
 * After a departure (departure.h) chunks are mapped by what was imported from their descriptors. Those of a GPU may be
 * on another one than the program, and none of them can be exported again (measured: docs/nvidia.md). So each is copied
 * to a new one, bit by bit, while the program runs.
 */
#ifndef GGROUP_CUDA_HOME_H
#define GGROUP_CUDA_HOME_H

#include "device.h"

/* Note that a device's imported chunks are to come home, from another GPU than the program's (`far`), or from the
 * same. */
void home_awaits(struct device *device, bool far);
/* Bring some of it home, unless the driver is busy: the program that moved this one may be giving up its contexts, and
 * each call takes 10 ms or more then (docs/nvidia.md), of which a batch makes dozens with the gate closed. Returns the
 * milliseconds until the next call, 0 for at once; -1 where nothing is left, or something else keeps it from coming. */
int64_t home_some(struct device *device);
/* Bring all of it home, if that does not take long. */
void home_all(struct device *device);
#endif
