/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules of busy periods, without a clock and without memory: what a program that goes before others says, what one
 * that goes behind makes of it, and for how long it may be held. All times are CLOCK_MONOTONIC, in nanoseconds.
 *
 * What is said after the last request is a ski-rental rule: to hold the others off for as long as a switch to them
 * and back costs is at most twice as dear as the best that could be done by one that knows when the next request comes.
 *
 * A program that goes behind is held for HOLD_ROW_NS at most in a row, and altogether for no more than HOLD_ROW_NS and
 * 99 parts of 100 of any time, whatever is said.
 */
#ifndef GGROUP_CUDA_HOLD_H
#define GGROUP_CUDA_HOLD_H

#include <stdbool.h>
#include <stdint.h>

#define HOLD_NS_A_US UINT64_C(1000)
/* For which work that is pending has others held, unless that is said again: so long a program that died does. */
#define HOLD_LEASE_NS (2000 * HOLD_NS_A_US)
/* What is farther ahead is of another clock, or a lie. */
#define HOLD_WORD_NS_MOST (10000 * HOLD_NS_A_US)
/* After the last request, at most: the daemon says how long. */
#define HOLD_AFTER_US_MOST 1000
/* In a row. */
#define HOLD_ROW_NS (100000 * HOLD_NS_A_US)
/* After so long in a row the gate is open for that. */
#define HOLD_OPEN_NS (1000 * HOLD_NS_A_US)
/* What is held in so many parts of the time may go on for one. */
#define HOLD_PARTS 99

/* What a program that goes before others says at `now`: until when they are held. */
static inline uint64_t hold_word(uint64_t now, bool pending, uint64_t after_ns)
{
	return now + (pending ? HOLD_LEASE_NS : after_ns);
}

/* Whether that is to be said again, while it has work. */
static inline bool hold_is_due(uint64_t word, uint64_t now)
{
	return word < now + HOLD_LEASE_NS / 2 || word > now + HOLD_LEASE_NS;
}

/* For how long from `now` on a word has others held. */
static inline uint64_t hold_left(uint64_t word, uint64_t now)
{
	return word > now && word - now <= HOLD_WORD_NS_MOST ? word - now : 0;
}

/* For how long one that goes behind was held. */
struct allowance {
	uint64_t at;		/* of what follows */
	uint64_t held;		/* of the row that may be; it is let go, and that shrinks again */
	uint64_t open_until;	/* until then it is not held */
};

/* So it is at `now`; `held`: it was, since the last time. */
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

/* For how long it may be held from `now` on, the time that was observed last. */
static inline uint64_t allowance_left(const struct allowance *allowance, uint64_t now)
{
	return now < allowance->open_until ? 0 : HOLD_ROW_NS - allowance->held;
}

#endif
