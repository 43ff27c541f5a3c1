/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast kernels of a program finish on a GPU, without a clock and without memory: what its run-ahead is bounded by. All
 * times are CLOCK_MONOTONIC, in microseconds, where nothing else is said.
 *
 * A time in which another program had the engine says nothing of the kernels: a program that goes behind others would take
 * its own for as long as their requests, launch too late, and leave the GPU without work. Where the others say that they had
 * it, nothing is learned. Others may have had it without a word, for a slice of 30 ms: so one kernel that took far longer
 * than those before counts PACE_LONGER_MOST times as long at most, or by one of 0.5 ms a program would be as far ahead as 10 ms,
 * and the engine be the other's again as soon as that had ended. Kernels that do take so long are known after some more.
 */
#ifndef GGROUP_CUDA_PACE_H
#define GGROUP_CUDA_PACE_H

#include <stdbool.h>
#include <stdint.h>

/* Parts of the bound that have a marker each: what was launched at once is heard of in these, and not when all of it has
 * finished and the GPU has nothing left to do. */
#define PACE_MARKS 8
/* Finished kernels in which a longer gap is forgotten, about: more than run at once. */
#define PACE_GAPS 64
/* Times as long as kernels took lately that one which took longer counts, at most. */
#define PACE_LONGER_MOST 4

/* What is known of how fast kernels finish on a GPU, while its run-ahead is bounded. */
struct pace {
	uint64_t finished, since;	/* so many have, by that moment, or did when the GPU was last idle; us */
	uint64_t kernel_ns;		/* that one took lately, on the average; 0: not known */
	uint64_t gap_us;		/* the longest lately in which none finished, but some were pending; 0: not known */
	unsigned int vain;		/* waits, since then, in which none finished */
};

/* What has finished by `now`, with some still pending or not. `watched`: there were some a moment ago. `disturbed`:
 * another program may have had the engine since the last time. */
static inline void pace_learn(struct pace *pace, uint64_t finished, bool pending, bool watched, bool disturbed, uint64_t now)
{
	const uint64_t gap_us = now - pace->since, most_ns = pace->kernel_ns * PACE_LONGER_MOST;
	uint64_t took_ns = gap_us * 1000 / (finished - pace->finished);
	/* Else all may have finished long ago: it was that long at most. */
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

/* Kernels behind which there is to be a marker, where `bound_us` is the lowest bound; 0: by time alone. */
static inline uint64_t pace_mark_every(const struct pace *pace, uint64_t bound_us)
{
	const uint64_t kernels = pace->kernel_ns ? bound_us * 1000 / PACE_MARKS / pace->kernel_ns : 0;

	return bound_us && !kernels ? 1 : kernels;
}

/* Whether so many kernels would take longer than a bound, by what is known; one that is not known does. */
static inline bool pace_takes_longer(const struct pace *pace, uint64_t kernels, uint64_t bound_us)
{
	return bound_us && kernels && (!pace->kernel_ns || kernels * pace->kernel_ns > bound_us * 1000);
}

/* What is left at `now` of so many kernels that are pending, in nanoseconds: of the oldest what it had since the last one
 * finished is done. What takes longer than others, or began later than is known, may be over at once. 0: nothing, or they are not
 * known. */
static inline uint64_t pace_left_ns(const struct pace *pace, uint64_t pending, uint64_t now)
{
	const uint64_t done_ns = now > pace->since ? (now - pace->since) * 1000 : 0;

	if (!pending)
		return 0;
	return (pending - 1) * pace->kernel_ns + (pace->kernel_ns > done_ns ? pace->kernel_ns - done_ns : 0);
}

/* Whether that is more than a bound; of kernels that are not known one may run, and another wait. */
static inline bool pace_has_more(const struct pace *pace, uint64_t pending, uint64_t bound_us, uint64_t now)
{
	if (!bound_us || !pending)
		return false;
	return pace->kernel_ns ? pace_left_ns(pace, pending, now) > bound_us * 1000 : pending > 1;
}

/* Microseconds after which that is no more, if nothing is heard before; 0: it is not known. */
static inline uint64_t pace_more_us(const struct pace *pace, uint64_t pending, uint64_t bound_us, uint64_t now)
{
	const uint64_t left_ns = pace_left_ns(pace, pending, now);

	return bound_us && left_ns > bound_us * 1000 ? (left_ns - bound_us * 1000 + 999) / 1000 : 0;
}

#endif
