/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast a program's kernels finish on a GPU, as pure functions without a clock or memory; its run-ahead is bounded
 * by this. All times are CLOCK_MONOTONIC, in microseconds unless stated otherwise.
 *
 * A time in which another program had the engine tells nothing about the kernels. Otherwise a program that goes behind
 * others would take its kernels to last as long as their requests, launch too late, and leave the GPU without work. So
 * nothing is learnt from times in which the others say that they had the engine. Others may also have it without saying
 * so, for a slice of 30 ms. Therefore a kernel that took far longer than those before counts as at most
 * PACE_LONGER_MOST times as long; otherwise, after one kernel of 0.5 ms, a program would be as far ahead as 10 ms, and
 * would lose the engine again as soon as that had finished. If kernels really take so long, that is known after a few
 * more.
 */
#ifndef GGROUP_CUDA_PACE_H
#define GGROUP_CUDA_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* Parts of the bound that have a marker each. Without them, kernels launched together would be known to have finished
 * only when all had, and the GPU had nothing left to do. */
#define PACE_MARKS 8
/* Finished kernels after which a longer gap is forgotten, approximately; more than run at once. */
#define PACE_GAPS 64
/* Most that a kernel which took longer than recent ones counts, as a multiple of their time. */
#define PACE_LONGER_MOST 4

/* How fast kernels finish on a GPU, learnt while run-ahead is bounded there. */
struct pace {
	uint64_t finished, since;	/* kernels finished by then, or when the GPU was last idle; us */
	uint64_t kernel_ns;		/* average time of a recent kernel; 0: unknown */
	uint64_t gap_us;		/* longest recent time with kernels pending and none finishing; 0: unknown */
	unsigned int vain;		/* waits since `since` in which no kernel finished */
};

/* Learns from the kernels that have `finished` by `now`. `pending`: some are still pending. `watched`: some were, a
 * moment ago. `disturbed`: another program may have had the engine since the last call. */
static inline void pace_learn(struct pace *pace, uint64_t finished, bool pending, bool watched, bool disturbed,
			      uint64_t now)
{
	const uint64_t gap_us = now - pace->since, most_ns = pace->kernel_ns * PACE_LONGER_MOST;
	uint64_t took_ns = gap_us * 1000 / (finished - pace->finished);
	/* Otherwise all may have finished long ago, and the gap is only an upper bound. */
	const bool sure = pending || watched;

	pace->finished = finished;
	pace->since = now;
	pace->vain = 0;
	if (disturbed)
		return;
	if (most_ns && took_ns > most_ns)
		took_ns = most_ns;
	if (sure || !pace->kernel_ns || took_ns < pace->kernel_ns)
		pace->kernel_ns = pace->kernel_ns ? (pace->kernel_ns + took_ns) / 2 : took_ns;
	pace->kernel_ns += !pace->kernel_ns;
	if (gap_us < pace->gap_us)
		pace->gap_us -= (pace->gap_us - gap_us) / PACE_GAPS;
	else if (sure)
		pace->gap_us = gap_us;
}

/* Returns the number of kernels behind which a marker is due, where `bound_us` is the lowest bound; 0: markers go by
 * time alone. */
static inline uint64_t pace_mark_every(const struct pace *pace, uint64_t bound_us)
{
	const uint64_t kernels = pace->kernel_ns ? bound_us * 1000 / PACE_MARKS / pace->kernel_ns : 0;

	return bound_us && !kernels ? 1 : kernels;
}

/* Whether `kernels` would take longer than the bound, as far as is known. Kernels of unknown length do. */
static inline bool pace_takes_longer(const struct pace *pace, uint64_t kernels, uint64_t bound_us)
{
	return bound_us && kernels && (!pace->kernel_ns || kernels * pace->kernel_ns > bound_us * 1000);
}

/* Returns how much of the `pending` kernels is left at `now`, in nanoseconds: the oldest has run since the last one
 * finished. A kernel that takes longer than others, or that began later than known, may end at once. 0: nothing is
 * left, or the time of a kernel is unknown. */
static inline uint64_t pace_left_ns(const struct pace *pace, uint64_t pending, uint64_t now)
{
	const uint64_t done_ns = now > pace->since ? (now - pace->since) * 1000 : 0;

	if (!pending)
		return 0;
	return (pending - 1) * pace->kernel_ns + (pace->kernel_ns > done_ns ? pace->kernel_ns - done_ns : 0);
}

/* Whether more is left than the bound. Of kernels of unknown length one may run while another waits. */
static inline bool pace_has_more(const struct pace *pace, uint64_t pending, uint64_t bound_us, uint64_t now)
{
	if (!bound_us || !pending)
		return false;
	return pace->kernel_ns ? pace_left_ns(pace, pending, now) > bound_us * 1000 : pending > 1;
}

/* Returns the time after which no more than the bound is left if nothing is heard before, in microseconds; 0:
 * unknown. */
static inline uint64_t pace_more_us(const struct pace *pace, uint64_t pending, uint64_t bound_us, uint64_t now)
{
	const uint64_t left_ns = pace_left_ns(pace, pending, now);

	return bound_us && left_ns > bound_us * 1000 ? (left_ns - bound_us * 1000 + 999) / 1000 : 0;
}

#endif
