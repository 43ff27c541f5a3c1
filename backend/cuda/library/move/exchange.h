/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is hot and in the host changes places with what is cold and on the GPU, where there is no room for
 * both.
 *
 * A limit that is written takes what was not looked at: which of it is used is learnt only from then on
 * (heat.h), and it changes while a program runs. The books stay as they are: as much comes as goes. Called by
 * the listening thread.
 */
#ifndef GGROUP_CUDA_EXCHANGE_H
#define GGROUP_CUDA_EXCHANGE_H

#include "device.h"

/* Moves some, if it is time and worth it; returns the milliseconds until it should be called again. */
int64_t exchange_tick(struct device *device);

/* What an exchange left off the GPU may have come: the daemon is told. */
void exchange_settle(struct device *device);

/* Bytes of the next piece, after one of `piece` that moved for `busy_us` and waited for the program for `waited_us`. */
uint64_t exchange_next(uint64_t piece, uint64_t busy_us, uint64_t waited_us);

#endif
