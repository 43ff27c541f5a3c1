/* SPDX-License-Identifier: Apache-2.0 */
/* Ends a test that hangs, with the stacks of all its threads. */
#ifndef UNIT_WATCH_H
#define UNIT_WATCH_H

#include <stdint.h>

/* From now on a step that takes longer than UNIT_STEP_S seconds (60), and SIGQUIT, end the test so. */
void watch_start(void);
/* Step `number` begins. */
void watch_step(uint64_t number);

#endif
