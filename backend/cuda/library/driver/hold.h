/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of busy periods, as pure functions without a clock or memory: what a program that goes before others
 * publishes, what a program behind it makes of that, and for how long it may be held. All times are CLOCK_MONOTONIC, in
 * nanoseconds.
 *
 * After the last request a ski-rental rule applies: holding the others for as long as a switch to them and back takes
 * costs at most twice as much as the best choice of a program that knows when its next request comes.
 *
 * A program that goes behind others is held for at most HOLD_ROW_NS in a row. Over any longer time it is held for at
 * most HOLD_ROW_NS plus 99 hundredths of that time, whatever is published.
 */
#ifndef GGROUP_CUDA_HOLD_H
#define GGROUP_CUDA_HOLD_H

#include <stdbool.h>
#include <stdint.h>

#define HOLD_NS_A_US UINT64_C(1000)
/* Time for which pending work holds others unless that is published again; a program that died holds them for as
 * long. */
#define HOLD_LEASE_NS (2000 * HOLD_NS_A_US)
/* Most that a word may lie ahead. One that lies farther ahead comes from another clock, or is false. */
#define HOLD_WORD_NS_MOST (10000 * HOLD_NS_A_US)
/* Longest hold after the last request; the daemon sets the actual one. */
#define HOLD_AFTER_US_MOST 1000
/* Bound on the work that a program behind others may have pending on the GPU: a divisor of the time since it was last
 * held. It grows up to HOLD_AHEAD_US_MOST: with less pending, a thread that is late leaves the GPU without work, for
 * nothing if no other program comes. */
#define HOLD_AHEAD_PART 64
#define HOLD_AHEAD_US_MOST 1000
/* Longest hold in a row. */
#define HOLD_ROW_NS (100000 * HOLD_NS_A_US)
/* Time for which the gate stays open after such a row. */
#define HOLD_OPEN_NS (1000 * HOLD_NS_A_US)
/* Factor by which time not held shrinks the time held so far. */
#define HOLD_PARTS 99

/* Returns the word that a program that goes before others publishes at `now`: until when they are held. */
static inline uint64_t hold_word(uint64_t now, bool pending, uint64_t after_ns)
{
	return now + (pending ? HOLD_LEASE_NS : after_ns);
}

/* Whether the word has to be published again while the program has work. */
static inline bool hold_is_due(uint64_t word, uint64_t now)
{
	return word < now + HOLD_LEASE_NS / 2 || word > now + HOLD_LEASE_NS;
}

/* Returns for how long from `now` on a word holds others. */
static inline uint64_t hold_left(uint64_t word, uint64_t now)
{
	return word > now && word - now <= HOLD_WORD_NS_MOST ? word - now : 0;
}

/* Returns how much work a program behind others may have pending at `now`. At least `ahead_us`; it was last held until
 * `until_us`. All in microseconds. */
static inline uint64_t hold_ahead_us(uint64_t ahead_us, uint64_t until_us, uint64_t now_us)
{
	uint64_t part = now_us > until_us ? (now_us - until_us) / HOLD_AHEAD_PART : 0;

	part = part < HOLD_AHEAD_US_MOST ? part : HOLD_AHEAD_US_MOST;
	return part > ahead_us ? part : ahead_us;
}

/* How long a program that goes behind others has been held. */
struct allowance {
	uint64_t at;		/* time of these figures */
	uint64_t held;		/* time held, of HOLD_ROW_NS; shrinks again while it is let go */
	uint64_t open_until;	/* the program is not held before this */
};

/* Brings the allowance up to `now`; `held`: the program was held since the previous call. */
static inline void allowance_observe(struct allowance *allowance, uint64_t now, bool held)
{
	const uint64_t passed = now > allowance->at ? now - allowance->at : 0;

	if (held)
		allowance->held += passed;
	else if (passed >= allowance->held / HOLD_PARTS)
		allowance->held = 0;
	else
		allowance->held -= passed * HOLD_PARTS;
	allowance->at = now > allowance->at ? now : allowance->at;
	if (allowance->held >= HOLD_ROW_NS) {
		allowance->held = HOLD_ROW_NS;
		if (allowance->open_until <= now)
			allowance->open_until = now + HOLD_OPEN_NS;
	}
}

/* Returns for how long the program may be held from `now` on, which is the time of the last allowance_observe. */
static inline uint64_t allowance_left(const struct allowance *allowance, uint64_t now)
{
	return now < allowance->open_until ? 0 : HOLD_ROW_NS - allowance->held;
}

#endif
