/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of backend/cuda/library/driver/hold.h as functions that tests call. */
#include "hold.h"

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

/* For how long it may be held from `now` on; `held`: it was, since the last time. */
uint64_t rules_may(struct allowance *allowance, uint64_t now, bool held)
{
	allowance_observe(allowance, now, held);
	return allowance_left(allowance, now);
}
