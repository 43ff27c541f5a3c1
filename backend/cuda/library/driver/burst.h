/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Busy periods: while a program works through a burst of requests, programs of worse priority launch nothing in
 * between.
 *
 * A program that goes before others on a GPU has a page there with a word that it alone writes: until when the others
 * are held. The daemon makes the page and hands it to the others for reading (backend/cuda/burst.py); it decides which
 * program goes before which. The rules are in hold.h. Held programs make no call of the driver for this. Nor does the
 * program that goes before them while it waits: it queries which events have passed.
 */
#ifndef GGROUP_CUDA_BURST_H
#define GGROUP_CUDA_BURST_H

#include "device.h"

/* Most programs that one program goes behind; further ones are ignored. */
#define BURST_LEADERS 8
/* Interval between two looks at whether the pending work has finished, in microseconds. */
#define BURST_LOOK_US 100

/* The beginning of the page, little endian. Mirrored by backend/cuda/burst.py. */
struct burst_page {
	uint64_t until;		/* time until which others are held; CLOCK_MONOTONIC, ns */
	uint64_t periods;	/* busy periods so far; each began when others were not held */
};

/* For programs that go before others */

extern unsigned int burst_leading;	/* atomically: number of GPUs on which others go behind this program */

/* Makes this program go before others on `device`, by the page in `fd`, which stays the caller's. They are held for
 * `after_us` after its last request. `fd` -1 ends this. False: not such a page. By the listening thread. */
bool burst_lead(struct device *device, int fd, uint64_t after_us);
void burst_begin(struct device *device);

/* Kernels are about to go to `device`, or have just gone. Called both before and after, so that none is missed. */
static inline void burst_launched(struct device *device)
{
	if (__builtin_expect(__atomic_load_n(&burst_leading, __ATOMIC_RELAXED) != 0, 0) && device)
		burst_begin(device);
}

void burst_end_of_wait(void);

/* The program has waited for its own work, or queried it. If all of it has finished, that is published at once, and not
 * only at the listening thread's next look. Called with gate_wait_enter. */
static inline void burst_waited(void)
{
	if (__builtin_expect(__atomic_load_n(&burst_leading, __ATOMIC_RELAXED) != 0, 0))
		burst_end_of_wait();
}

/* Publishes for all GPUs whether work is pending. Returns whether to call it again in BURST_LOOK_US: work is pending,
 * or others are still held. The call may come late, by the time the caller's other work takes, but the caller must not
 * sleep in between. By the listening thread. */
bool burst_tick(void);
/* Wakes the listening thread when there is something to look at. Set by listener.c. */
extern void (*burst_wake)(void);

/* For programs that go behind others */

/* Makes this program go behind another on `device`, by the page in `fd`; -1 clears `slot`. Returns whether it goes
 * behind any program. By the listening thread. */
bool burst_follow(struct device *device, unsigned int slot, int fd);
/* Whether launches on the device `ordinal` are held now. */
bool burst_holds(CUdevice ordinal);
/* Time until which launches are or were last held, by the words of the programs that go first; CLOCK_MONOTONIC, us.
 * Until then one of these may have had the engine. 0: never held. Takes no lock. */
uint64_t burst_held_until(CUdevice ordinal);
/* Waits, outside the gate, until launches are no longer held. */
void burst_wait(CUdevice ordinal);
/* Number of threads that wait in burst_wait. */
unsigned int burst_waiting(CUdevice ordinal);

/* Ends both roles on `device`: this program goes behind none, and none goes behind it. By the listening thread. */
void burst_end(struct device *device);

#endif
