/* SPDX-License-Identifier: Apache-2.0 */
/* The listening thread: carries out what the daemon asks, brings memory back, and looks after the counters. */
#ifndef GGROUP_CUDA_LISTENER_H
#define GGROUP_CUDA_LISTENER_H

/* Start the thread and connect, if the environment names a daemon (GGROUP_SOCKET). Runs once a process, by itself when
 * a device becomes known. */
void listener_begin(void);

#endif
