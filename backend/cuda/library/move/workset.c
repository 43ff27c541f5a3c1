// SPDX-License-Identifier: Apache-2.0
#include "workset.h"

#include <string.h>

#include "clean.h"
#include "foreign.h"
#include "heat.h"
#include "importer.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "order.h"
#include "totals.h"
#include "turn.h"

/* Microseconds. */
#define SHORT 20000		/* a turn watched for less than this is part of the next one */
#define LONGEST 4000000		/* a turn longer than this counts as several */
#define LOOK 1000000		/* time for which a program without turns is looked at */
#define REST 9000000		/* time until it is looked at again */
#define TELL 100000		/* time between two reports, each a walk through all chunks */
#define PREPARED 10000000	/* time after a PREPARE for which memory comes in only as the daemon asks */
#define NEVER 2000		/* ms */

/* The state of each device, by its ordinal. */
static struct watch {
	bool wanted, known;	/* the daemon asks for it; it has been learnt once */
	bool takes_turns;
	uint64_t since;		/* time from which uses count; 0: they do not */
	uint64_t next_look, next_tell;
	uint64_t prepared;	/* time of the last one; 0: never */
} watches[GG_ORDINALS];

static int64_t ms_until(uint64_t then)
{
	const uint64_t now = moment_us();

	return then > now ? (int64_t)((then - now) / 1000 + 1) : 0;
}

void workset_tell(struct device *device)
{
	struct watch *watch = &watches[device->ordinal];
	struct totals_set set = { 0 };

	if (!watch->known)
		return;
	watch->next_tell = moment_us() + TELL;
	order_sums(device, &set.used, &set.resident);
	order_misses(device, &set.missed, &set.over);
	set.unwritten = clean_unwritten(device);
	totals_tell(device, &set, foreign_is_shared() || importer_any() ? TOTALS_SHARES : TOTALS_ALONE);
}

static void learn(struct device *device, struct watch *watch)
{
	order_learn(device, moment_us() - watch->since);
	watch->since = 0;
	watch->known = true;
	watch->next_look = moment_us() + REST;
}

/* Uses are tracked for all devices or none. Also while the program waits for its turn, so that none of the next turn is
 * missed. */
static void want_heat(void)
{
	bool any = false;

	for (size_t i = 0; i < GG_ORDINALS; i++)
		any |= watches[i].since || watches[i].takes_turns;
	heat_want(HEAT_WORKSET, any);
}

static void stop(struct device *device, struct watch *watch)
{
	if (!watch->wanted)
		return;
	totals_tell(device, &(struct totals_set){ 0 }, TOTALS_UNKNOWN);
	*watch = (struct watch){ 0 };
	want_heat();
}

int64_t workset_tick(struct device *device, bool wanted)
{
	struct watch *watch = &watches[device->ordinal];
	const uint64_t now = moment_us();
	bool runs;

	if (!wanted || !device->elastic || !device->regions) {
		stop(device, watch);
		return NEVER;
	}
	watch->wanted = true;
	runs = !turn_is_over(device);
	watch->takes_turns = turn_is_one(device);
	if (runs && watch->since && now - watch->since >= (watch->takes_turns ? LONGEST : LOOK))
		learn(device, watch), watch->next_tell = 0;
	if (runs && !watch->since &&
	    (watch->takes_turns || heat_is_wanted_for(HEAT_EXCHANGE) || now >= watch->next_look)) {
		/* Uses seen since the last look are not part of this one. */
		if (!watch->takes_turns)
			order_begin(device);
		watch->since = now;
	}
	want_heat();
	if (now >= watch->next_tell)
		workset_tell(device);
	if (!runs)
		return NEVER;
	return ms_until(watch->since ? watch->since + (watch->takes_turns ? LONGEST : LOOK) : watch->next_look);
}

void workset_turn_over(struct device *device)
{
	struct watch *watch = &watches[device->ordinal];

	if (!watch->since || moment_us() - watch->since < SHORT)
		return;
	learn(device, watch);
	workset_tell(device);
}

void workset_prepared(struct device *device)
{
	watches[device->ordinal].prepared = moment_us();
}

bool workset_is_prepared(struct device *device)
{
	const uint64_t prepared = watches[device->ordinal].prepared;

	return prepared && moment_us() - prepared < PREPARED;
}

static void forget(void)
{
	memset(watches, 0, sizeof(watches));
}

LIFE(.stage = LIFE_MOVES, .forget = forget);
