/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other end of the socket: backend/cuda/server.py, by the messages of backend/door/wire.py.
 *
 * One thread listens: it carries out what the daemon asks (RECLAIM, ROOM), hands replies to the threads that wait,
 * and looks after the counters. It sleeps in poll(2). Requests may come from any thread. When the daemon goes
 * away everything is granted; when one is there again it is told what is resident and what is swapped.
 */
#ifndef GGROUP_CUDA_DAEMON_H
#define GGROUP_CUDA_DAEMON_H

#include "device.h"

/* Tells the daemon of a device; sets device->index, or leaves it -1. */
void daemon_manage(struct device *device);

/* Charges `bytes`; 0 once every level is under its high, ENOMEM where it is refused. Waits: not inside the gate. */
int daemon_charge(struct device *device, uint64_t bytes);
/* Whether the daemon knows that managed memory is charged, and that no driver counts it (device->managed). */
bool daemon_knows_managed(struct device *device);
/* They were freed: those on the GPU, those in the host. Does not wait. */
void daemon_uncharge(struct device *device, uint64_t resident, uint64_t swapped);
/* Whether `bytes` may come back to the GPU: 0 and booked, or EAGAIN. Called by the listening thread. */
int daemon_move_in(struct device *device, uint64_t bytes);
/* The lowest limit above the program now, and what is free under all of them; false: there is none. What it is to see as
 * the size of its GPU is sight.h's. */
bool daemon_limits(struct device *device, uint64_t *total, uint64_t *free);
/* What cannot be moved changed (device->foreign), or memory changes places (away), or has (exchanged). What a checkpoint
 * carries (intact) is told with it, and in seconds anyhow. */
void daemon_report(struct device *device);

void daemon_forget(void);	/* in the child of fork(): closes the socket, which is the parent's */

#endif
