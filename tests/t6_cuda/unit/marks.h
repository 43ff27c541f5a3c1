/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of hash.cu for the double of the driver. */
#ifndef UNIT_MARKS_H
#define UNIT_MARKS_H

#include <stdbool.h>
#include <stdint.h>

/* Number of marks made so far. */
uint64_t marks_made(void);
/* Has marks not end from now on, or lets all end. */
void marks_hold(bool hold);

#endif
