/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Exchanges of hot memory in the host with cold memory on the GPU, where there is no room for both.
 *
 * A limit that is written takes memory without knowing which of it is used: that is learnt only from then on (heat.h),
 * and it changes while a program runs. The books stay as they are: as much comes as goes. Called by the listening
 * thread.
 */
#ifndef GGROUP_CUDA_EXCHANGE_H
#define GGROUP_CUDA_EXCHANGE_H

#include "device.h"

/* Exchange some memory, if it is time and worth it; returns the milliseconds until the next call is due. */
int64_t exchange_tick(struct device *device);

/* Tell the daemon of memory that an exchange left off the GPU and that may have come back. */
void exchange_settle(struct device *device);

/* Return the bytes of the next piece, after one of `piece` that moved for `busy_us` and waited for the program for
 * `waited_us`. */
uint64_t exchange_next(uint64_t piece, uint64_t busy_us, uint64_t waited_us);

#endif
