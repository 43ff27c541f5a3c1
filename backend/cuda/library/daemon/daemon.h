/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's end of the daemon's socket. The other end is backend/cuda/server.py, with the messages of
 * backend/door/wire.py.
 *
 * One thread listens: it carries out the daemon's requests (RECLAIM, ROOM), hands replies to the threads that wait for
 * them, and looks after the counters. It sleeps in poll(2). Requests to the daemon may come from any thread. While
 * there is no daemon everything is granted; a daemon that comes is told what is resident and what is swapped.
 */
#ifndef GGROUP_CUDA_DAEMON_H
#define GGROUP_CUDA_DAEMON_H

#include "device.h"

/* Tell the daemon of a device; sets device->index, or leaves it -1. */
void daemon_manage(struct device *device);

/* Charge `bytes`: 0 once every level is under its high, ENOMEM where it is refused. Waits: not inside the gate. */
int daemon_charge(struct device *device, uint64_t bytes);
/* Return whether the daemon knows that managed memory is charged, and that no driver counts it (device->managed). */
bool daemon_knows_managed(struct device *device);
/* Uncharge freed bytes: those on the GPU, those in the host. Does not wait. */
void daemon_uncharge(struct device *device, uint64_t resident, uint64_t swapped);
/* Ask whether `bytes` may come back to the GPU: 0, and they are booked, or EAGAIN. Called by the listening thread. */
int daemon_move_in(struct device *device, uint64_t bytes);
/* Get the lowest limit above the program now, and the bytes that are free under all limits; false where there is none.
 * sight.h has the size of the GPU that the program is shown. */
bool daemon_limits(struct device *device, uint64_t *total, uint64_t *free);
/* Report that unmovable memory changed (device->foreign), or that memory changes places (away), or has (exchanged).
 * What a checkpoint carries (intact) is reported with it, and every few seconds in any case. */
void daemon_report(struct device *device);

void daemon_forget(void);	/* in the child of fork(): closes the child's copy of the parent's socket */

#endif
