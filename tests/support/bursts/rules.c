/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of hold.h and pace.h (backend/cuda/library/driver) as functions that tests call. */
#include "hold.h"
#include "pace.h"

uint64_t rules_word(uint64_t now, bool pending, uint64_t after_ns)
{
	return hold_word(now, pending, after_ns);
}

bool rules_due(uint64_t word, uint64_t now)
{
	return hold_is_due(word, now);
}

uint64_t rules_left(uint64_t word, uint64_t now)
{
	return hold_left(word, now);
}

uint64_t rules_ahead_us(uint64_t ahead_us, uint64_t until_us, uint64_t now_us)
{
	return hold_ahead_us(ahead_us, until_us, now_us);
}

/* Returns for how long the program may be held from `now` on; `held`: whether it was held at the last call. */
uint64_t rules_may(struct allowance *allowance, uint64_t now, bool held)
{
	allowance_observe(allowance, now, held);
	return allowance_left(allowance, now);
}

void rules_learn(struct pace *pace, uint64_t finished, bool pending, bool watched, bool disturbed, uint64_t now)
{
	pace_learn(pace, finished, pending, watched, disturbed, now);
}

uint64_t rules_mark_every(const struct pace *pace, uint64_t bound_us)
{
	return pace_mark_every(pace, bound_us);
}

uint64_t rules_more_us(const struct pace *pace, uint64_t pending, uint64_t bound_us, uint64_t now)
{
	return pace_more_us(pace, pending, bound_us, now);
}

bool rules_has_more(const struct pace *pace, uint64_t pending, uint64_t bound_us, uint64_t now)
{
	return pace_has_more(pace, pending, bound_us, now);
}
