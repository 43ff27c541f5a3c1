/* SPDX-License-Identifier: Apache-2.0 */
/* A thread that has memory moved, as the daemon would, while another makes calls: before, during and after them. */
#ifndef UNIT_MOVES_H
#define UNIT_MOVES_H

#include "device.h"

void moves_start(struct device *device);
/* Has something move, and waits for it. */
void moves_now(void);
/* ... and does not wait: it moves during the calls that come. */
void moves_along(void);
/* The same from within a call of the driver: waits for a moment, as what moves may wait for that call. */
void moves_within(void);
/* Nothing moves from here on, until it is asked for; or may, even if it is. */
void moves_rest(void);
void moves_allow(bool allowed);

#endif
