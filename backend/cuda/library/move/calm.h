/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calm: the gate is closed, and nothing runs. Reaching it means waiting with the gate closed: for threads that are
 * inside, as a synchronous copy is until the work queued before it has run, and then for the submitted work.
 *
 * The wait lasts up to CALM_MOST_US for both, while kernels end or threads leave. While none does, it lasts work_us of
 * the device's mover, and after each wait in vain twice as long, up to CALM_MOST_US: a kernel that reads over the bus
 * takes many times as long as one in memory of the GPU. After a wait in vain the program has the gate open for REST
 * times as long, and longer after each further one. Meanwhile moves that the program itself needs are not begun, and
 * those for the daemon wait as long as at first. Where the queue is what takes long, the program's run-ahead is bounded
 * for a while (turn.h).
 *
 * For the holder of mover->lock; a departure has those of all devices.
 */
#ifndef GGROUP_CUDA_CALM_H
#define GGROUP_CUDA_CALM_H

#include "device.h"

/* Most microseconds for which the gate is closed to wait for running work. */
#define CALM_MOST_US 2000000

/* The state of a device, in its mover. */
struct calm {
	uint64_t needs_us;	/* patience while nothing ends; work_us where that is more */
	unsigned int vain;	/* number of waits in vain since the last success */
	uint64_t rest_until;	/* by moment_us; atomically */
	uint64_t held_us;	/* time that newcomers have waited, ever, while threads were inside; atomically */
	uint64_t bound_until;	/* end of the bound on run-ahead; 0: none */
	/* The attempt in progress. Times are by moment_us. */
	uint64_t begun, closed;	/* start; time since when the gate is closed, 0: never */
	uint64_t since;		/* time when a kernel last ended, or a thread left */
	unsigned int inside;	/* threads inside at that time */
	uint64_t finished;	/* kernels finished on all GPUs at that time */
	bool short_of_time;	/* kernels kept ending until the time was up */
};

/* Close the gate; false leaves it open. `timeout_ms`: for the end of captures, and of another thread's closing. */
bool calm_close(struct device *device, unsigned int timeout_ms);
/* With the gate closed: wait until nothing runs on `of`, as a part of the attempt of `device`. */
bool calm_quiet(struct device *device, struct device *of);
/* End the attempt; `calm`: whether it succeeded. Before the gate is opened. */
void calm_over(struct device *device, bool calm);

/* Return whether the program is to have the gate open now. In any thread, without the lock; likewise the next. */
bool calm_rests(const struct device *device);
/* Return the microseconds for which threads of the program were kept outside, ever, for others that were inside. */
uint64_t calm_held(const struct device *device);
/* End a bound whose time is up; to be called from time to time. */
void calm_tick(struct device *device);

#endif
