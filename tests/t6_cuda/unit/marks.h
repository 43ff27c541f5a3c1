/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of hash.cu for the double of the driver. */
#ifndef UNIT_MARKS_H
#define UNIT_MARKS_H

#include <stdbool.h>
#include <stdint.h>

/* Number of marks made so far. */
uint64_t marks_made(void);
/* Keeps kernels from ending, or lets them end. */
void marks_hold(bool hold);

#endif
