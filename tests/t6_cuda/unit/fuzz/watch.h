/* SPDX-License-Identifier: Apache-2.0 */
/* A watchdog that ends a hanging test with the stacks of all its threads. */
#ifndef UNIT_WATCH_H
#define UNIT_WATCH_H

#include <stdint.h>

/* From now on, SIGQUIT and a step of more than UNIT_STEP_S seconds (60) end the test like that. */
void watch_start(void);
/* Note that step `number` begins. */
void watch_step(uint64_t number);

#endif
