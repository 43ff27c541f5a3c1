/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Busy periods: while a program works through a burst of requests, programs of worse priority launch nothing in
 * between.
 *
 * A program that goes before others on a GPU has a page there of which it alone writes the word: until when the others
 * are held. The daemon makes it, and gives it to those for reading (backend/cuda/burst.py); it decides which program
 * goes before which. hold.h has the rules. No call of the driver is made for it by those that are held, and none by the
 * other that waits: it asks which events have passed.
 */
#ifndef GGROUP_CUDA_BURST_H
#define GGROUP_CUDA_BURST_H

#include "device.h"

/* Programs that one goes behind, at most; of more it knows the first. */
#define BURST_LEADERS 8
/* Between two looks whether what is pending has finished, in microseconds. */
#define BURST_LOOK_US 100

/* Little endian, at the beginning of the page. Mirrored by backend/cuda/burst.py. */
struct burst_page {
	uint64_t until;		/* CLOCK_MONOTONIC, ns */
};

/* Those that go before others */

extern unsigned int burst_leading;	/* atomically: GPUs on which others go behind this program */

/* Others go behind it on `device` from now on, by the page in `fd`, which stays the caller's, for `after_us` after its
 * last request; -1: none does any more. False: not such a page. By the listening thread. */
bool burst_lead(struct device *device, int fd, uint64_t after_us);
void burst_begin(struct device *device);

/* Kernels are about to go to `device`, or have gone there: said before and after, so that none is missed. */
static inline void burst_launched(struct device *device)
{
	if (__builtin_expect(__atomic_load_n(&burst_leading, __ATOMIC_RELAXED) != 0, 0) && device)
		burst_begin(device);
}

void burst_end_of_wait(void);

/* The program has waited for work of its own, or asked for it: where all has finished that is known at once, and not
 * when the listening thread next looks. With gate_wait_enter. */
static inline void burst_waited(void)
{
	if (__builtin_expect(__atomic_load_n(&burst_leading, __ATOMIC_RELAXED) != 0, 0))
		burst_end_of_wait();
}

/* Says of all GPUs what is pending; whether any of it is to be looked at again, in BURST_LOOK_US. By the listening
 * thread. */
bool burst_tick(void);
/* Wakes that thread, when there is something to look at: set by listener.c. */
extern void (*burst_wake)(void);

/* Those that go behind */

/* It goes behind another one on `device`, by the page in `fd`; -1: `slot` has none any more. Whether it goes behind
 * any. By the listening thread. */
bool burst_follow(struct device *device, unsigned int slot, int fd);
/* Whether launches on the device of that number are held now. */
bool burst_holds(CUdevice ordinal);
/* Waits, outside the gate, until they are not. */
void burst_wait(CUdevice ordinal);
/* Threads that wait there. */
unsigned int burst_waiting(CUdevice ordinal);

/* It goes behind none on `device`, and none behind it. By the listening thread. */
void burst_end(struct device *device);

#endif
