// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <string.h>

#include "calm.h"
#include "daemon.h"
#include "heat.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "mover.h"
#include "pick.h"

/* Microseconds. */
#define LOOK 250000		/* interval between two looks */
#define LOOK_AT_LAST 10000000	/* the same, for a program that uses nothing often */
#define HEATED 60000000		/* time for which uses are tracked after all has come back: a limit may be near */
#define NEVER 2000		/* ms */

/* Least and most bytes exchanged at a time; the daemon's requests are served in between. */
#define PIECE (256 * GG_MIB)
#define PIECE_MOST (1024 * GG_MIB)	/* twice that is AWAY_MOST of backend/cuda/holding.py */
/* Time that the program then runs undisturbed, as a multiple of the exchange, which holds it up. */
#define REST 3

/* The state of each device, by its ordinal. */
static struct pace {
	uint64_t looked, next_look;
	uint64_t next_move;
	uint64_t piece;		/* bytes; 0: none moved yet */
	uint64_t last_swapped;
	bool heated;
} paces[GG_ORDINALS];

static int64_t ms_until(uint64_t then)
{
	const uint64_t now = moment_us();

	return then > now ? (int64_t)((then - now) / 1000 + 1) : 0;
}

uint64_t exchange_next(uint64_t piece, uint64_t busy_us, uint64_t waited_us)
{
	/* Each exchange closes the gate twice and waits for the kernels each time. If the waits take longest, a larger
	 * piece pays. */
	if (waited_us > busy_us)
		return piece * 2 < PIECE_MOST ? piece * 2 : PIECE_MOST;
	return piece / 2 > PIECE ? piece / 2 : PIECE;
}

static void exchange(struct device *device, struct pace *pace, size_t bytes)
{
	const uint64_t start = moment_us(), held = calm_held(device);
	uint64_t moved, now, waited, busy_us;

	/* Tell the daemon before: otherwise it would take the drop in the driver's figure for free room. */
	__atomic_store_n(&device->away, bytes, __ATOMIC_RELAXED);
	daemon_report(device);
	moved = mover_exchange(device, bytes, &busy_us);
	now = moment_us();
	waited = now - start > busy_us ? now - start - busy_us : 0;

	log_line("device %d: exchanged %llu of %llu MiB in %llu us, waited %llu us", device->ordinal,
		  (unsigned long long)(moved / GG_MIB), (unsigned long long)(bytes / GG_MIB),
		  (unsigned long long)busy_us, (unsigned long long)waited);
	/* While kernels are waited for, the program gets on with these, but not with the work of threads that are kept
	 * outside the gate for one inside. If nothing moved now, nothing will in a moment. */
	pace->next_move = now + (moved ? (busy_us + calm_held(device) - held) * REST : LOOK);
	if (moved)
		pace->piece = exchange_next(pace->piece, busy_us, waited);
	__atomic_add_fetch(&device->exchanged, moved, __ATOMIC_RELAXED);
	/* Bytes that went out and did not come back are still off the GPU, and the program's own. */
	__atomic_store_n(&device->away, mover_owed(device), __ATOMIC_RELAXED);
	daemon_report(device);
}

void exchange_settle(struct device *device)
{
	const uint64_t owed = mover_owed(device);

	if (owed >= __atomic_load_n(&device->away, __ATOMIC_RELAXED))
		return;
	__atomic_store_n(&device->away, owed, __ATOMIC_RELAXED);
	daemon_report(device);
}

/* Uses are tracked for all devices or none. */
static void heat(struct pace *pace, bool wanted)
{
	bool any = false;

	pace->heated = wanted;
	for (size_t i = 0; i < GG_ORDINALS; i++)
		any |= paces[i].heated;
	heat_want(HEAT_EXCHANGE, any);
}

int64_t exchange_tick(struct device *device)
{
	struct pace *pace = &paces[device->ordinal];
	uint64_t now = moment_us();
	size_t bytes;

	if (__atomic_load_n(&device->swapped, __ATOMIC_RELAXED))
		pace->last_swapped = now;
	if (!pace->last_swapped || now - pace->last_swapped > HEATED) {
		heat(pace, false);
		return NEVER;
	}
	heat(pace, true);
	if (now >= pace->next_look) {
		if (pick_look(device, now - pace->looked > LOOK_AT_LAST))
			pace->looked = now;
		pace->next_look = now + LOOK;
	}
	if (!pace->piece)
		pace->piece = PIECE;
	bytes = now < pace->next_move || calm_rests(device) ? 0 : pick_misplaced(device, pace->piece);
	if (bytes)
		exchange(device, pace, bytes);
	else if (now >= pace->next_move)
		pace->next_move = pace->next_look;
	return ms_until(pace->next_move < pace->next_look ? pace->next_move : pace->next_look);
}

static void forget(void)
{
	memset(paces, 0, sizeof(paces));
}

LIFE(.stage = LIFE_MOVES, .forget = forget);
