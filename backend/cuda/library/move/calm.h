/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calm: the gate is closed, and nothing runs. What it takes is waited for with the gate closed: threads that are inside, as a
 * synchronous copy is until what is queued before it has run, and then what was submitted.
 *
 * For how long: CALM_MOST_US for both, while kernels end or threads leave. Where none does, for work_us of the device's
 * mover, and after each time in vain twice as long, up to CALM_MOST_US: a kernel that reads over the bus takes many times as
 * long as one in memory of the GPU. The program has the gate open for REST times as long after that, and longer after each
 * more that is in vain: what it asks for itself is not begun then, and what the daemon asks for is waited for as at first.
 * Where the queue is what takes long, its run-ahead is bounded for a while (turn.h).
 *
 * By the holder of mover->lock; a departure has those of all devices.
 */
#ifndef GGROUP_CUDA_CALM_H
#define GGROUP_CUDA_CALM_H

#include "device.h"

/* Microseconds for which the gate is closed at most, for what runs. */
#define CALM_MOST_US 2000000

/* Of a device, in its mover. */
struct calm {
	uint64_t needs_us;	/* for how long what runs is waited for while nothing ends; less than work_us: for that */
	unsigned int vain;	/* waits of that time in vain, since the last that was not */
	uint64_t rest_until;	/* by moment_us; atomically */
	uint64_t held_us;	/* for which newcomers waited, ever, while threads were inside; atomically */
	uint64_t bound_until;	/* its run-ahead is bounded until then; 0: it is not */
	/* Of the attempt that is under way. */
	uint64_t begun, closed;	/* when; and since when the gate is, 0: never */
	uint64_t since;		/* when something last ended, or a thread left */
	unsigned int inside;	/* threads, then */
	uint64_t finished;	/* kernels of all GPUs, then */
	bool short_of_time;	/* something ended all the time */
};

/* Closes the gate; false: it is open. `timeout_ms`: for the end of captures, and of what another thread has it closed for. */
bool calm_close(struct device *device, unsigned int timeout_ms);
/* With the gate closed: waits until nothing runs on `of`, as a part of the attempt of `device`. */
bool calm_quiet(struct device *device, struct device *of);
/* That attempt is over: whether all was calm. Before the gate is opened. */
void calm_over(struct device *device, bool calm);

/* Whether the program is to have the gate open now. In any thread, without the lock; as what follows. */
bool calm_rests(const struct device *device);
/* For how long threads of the program were kept outside, ever, for others that were inside; us. */
uint64_t calm_held(const struct device *device);
/* What was bounded may not be any more: to be called from time to time. */
void calm_tick(struct device *device);

#endif
