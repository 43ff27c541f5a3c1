/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that listens to the daemon: what that asks is done there, memory comes back, counters are
 * looked after. */
#ifndef GGROUP_CUDA_LISTENER_H
#define GGROUP_CUDA_LISTENER_H

#include <stdbool.h>

/* Starts it; whether there is one. The session knows its path and its pipe. */
bool listener_start(void);

#endif
