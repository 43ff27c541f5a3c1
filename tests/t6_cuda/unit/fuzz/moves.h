/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that moves memory, as the daemon would, while another makes calls: before, during and after them. */
#ifndef UNIT_MOVES_H
#define UNIT_MOVES_H

#include "device.h"

void moves_start(struct device *device);
/* Move something, and wait for the end. */
void moves_now(void);
/* Move something during the calls that come next, without waiting. */
void moves_along(void);
/* Move something from within a call of the driver: wait only for a moment, since the move may wait for that call. */
void moves_within(void);
/* Return how many chunks were bare so far, at the ends of gaps (bare.h). */
unsigned int moves_bare(void);
/* Move nothing from here on unless asked to; or allow moves, or forbid them altogether. */
void moves_rest(void);
void moves_allow(bool allowed);

#endif
