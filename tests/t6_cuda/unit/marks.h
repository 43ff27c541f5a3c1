/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel of hash.cu for the double of the driver. */
#ifndef UNIT_MARKS_H
#define UNIT_MARKS_H

#include <stdbool.h>
#include <stdint.h>

/* How many marks were made. */
uint64_t marks_made(void);
/* None ends from now on, or all do. */
void marks_hold(bool hold);

#endif
