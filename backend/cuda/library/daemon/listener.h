/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that listens to the daemon: what that asks is done there, memory comes back, counters are
 * looked after. */
#ifndef GGROUP_CUDA_LISTENER_H
#define GGROUP_CUDA_LISTENER_H

/* Starts the thread and connects, if the environment names a daemon (GGROUP_SOCKET). Once a process: by itself when a
 * device is known. */
void listener_begin(void);

#endif
