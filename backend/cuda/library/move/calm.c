// SPDX-License-Identifier: Apache-2.0
#include "calm.h"

#include "carry.h"
#include "counters.h"
#include "driver.h"
#include "gate.h"
#include "log.h"
#include "moment.h"
#include "quiet.h"
#include "totals.h"
#include "turn.h"

/* Length of the rest after a wait in vain, during which the gate is open: in multiples of that wait. It doubles with
 * each further wait in vain, RESTS_MOST times at most. */
#define REST 3
#define RESTS_MOST 1
/* Microseconds of work that may be queued after a long queue was waited for in vain, and microseconds for which that
 * bound lasts. */
#define RUN_AHEAD_US 250000
#define BOUND_US 10000000

static struct calm *calm_of(const struct device *device)
{
	return &device->mover->calm;
}

/* Return the microseconds for which no kernel has to end before the wait is given up. */
static uint64_t patience(const struct device *device)
{
	const uint64_t least = device->mover->work_us, needs = calm_of(device)->needs_us;

	return calm_rests(device) || needs < least ? least : needs;
}

/* Return the time at which the gate is opened at the latest, apart from calls of the driver in progress then. */
static uint64_t deadline(const struct device *device)
{
	const uint64_t least = device->mover->work_us;

	return calm_of(device)->begun + (least > CALM_MOST_US ? least : CALM_MOST_US);
}

static void look(struct device *device, void *sum)
{
	uint64_t submitted, finished;

	counters_progress(device);
	totals_get(device, &submitted, &finished);
	*(uint64_t *)sum += finished;
}

/* Return whether any kernel ended since the last look, whichever thread saw it first. */
static bool any_ended(struct calm *calm)
{
	const uint64_t before = calm->finished;

	calm->finished = 0;
	device_each(look, &calm->finished);
	return calm->finished > before;
}

/* Return whether to go on waiting for threads inside: what they wait for may be running on any GPU. */
static bool is_patient(unsigned int inside, void *argument)
{
	struct device *device = argument;
	struct calm *calm = calm_of(device);
	const uint64_t now = moment_us();

	if (calm_rests(device))
		return false;
	if (!calm->closed)
		calm->closed = now;
	if (any_ended(calm) || inside < calm->inside)
		calm->since = now;
	calm->inside = inside;
	calm->short_of_time = now - calm->since < patience(device);
	return calm->short_of_time && now < deadline(device);
}

bool calm_close(struct device *device, unsigned int timeout_ms)
{
	struct calm *calm = calm_of(device);
	bool closed;

	calm->begun = calm->since = moment_us();
	calm->closed = 0;
	calm->inside = 0;
	calm->short_of_time = false;
	any_ended(calm);
	closed = gate_close_patiently(timeout_ms, is_patient, device);
	/* Before this was asked, the gate may have been open for the end of a capture. */
	if (calm->closed)
		__atomic_add_fetch(&calm->held_us, moment_us() - calm->closed, __ATOMIC_RELAXED);
	else if (closed)
		calm->closed = calm->begun;
	return closed;
}

uint64_t calm_held(const struct device *device)
{
	return device->mover ? __atomic_load_n(&calm_of(device)->held_us, __ATOMIC_RELAXED) : 0;
}

bool calm_quiet(struct device *device, struct device *of)
{
	struct calm *calm = calm_of(device);
	/* The work that threads inside waited for is nearly over. */
	const uint64_t least = moment_us() + device->mover->work_us;
	const uint64_t until = deadline(device) > least ? deadline(device) : least;

	for (uint64_t now = moment_us();; now = moment_us()) {
		const uint64_t rest = now < until ? until - now : 0, wait = patience(device);

		if (quiet_wait(of, wait < rest ? wait : rest))
			return true;
		calm->short_of_time = any_ended(calm);
		if (!calm->short_of_time || moment_us() >= until)
			return false;
	}
}

static void in_vain(struct device *device)
{
	struct calm *calm = calm_of(device);
	const uint64_t now = moment_us(), took = now - calm->closed, tried = patience(device);
	const unsigned int rests = calm->vain < RESTS_MOST ? calm->vain : RESTS_MOST;

	calm->vain++;
	calm->needs_us = 2 * tried < CALM_MOST_US ? 2 * tried : CALM_MOST_US;
	__atomic_store_n(&calm->rest_until, now + (took * REST << rests), __ATOMIC_RELAXED);
	if (calm->short_of_time) {
		calm->bound_until = now + BOUND_US;
		turn_bound(device, RUN_AHEAD_US);
	}
	log_line("device %d: what runs takes longer than %llu us%s; waits in vain: %u", device->ordinal,
		 (unsigned long long)took, calm->short_of_time ? ", and much is queued" : "", calm->vain);
}

void calm_over(struct device *device, bool calm_now)
{
	struct calm *calm = calm_of(device);
	const uint64_t now = moment_us(), took = now - calm->begun;

	if (calm_now) {
		calm->needs_us = 2 * took < CALM_MOST_US ? 2 * took : CALM_MOST_US;
		calm->vain = 0;
		__atomic_store_n(&calm->rest_until, 0, __ATOMIC_RELAXED);
	} else if (calm->closed && now - calm->closed >= device->mover->work_us && !calm_rests(device)) {
		in_vain(device);
	}
}

bool calm_rests(const struct device *device)
{
	return device->mover && moment_us() < __atomic_load_n(&calm_of(device)->rest_until, __ATOMIC_RELAXED);
}

void calm_tick(struct device *device)
{
	struct calm *calm;

	/* Another thread has the lock and is at work, or this one comes again. */
	if (!device->mover || pthread_mutex_trylock(&device->mover->lock))
		return;
	calm = calm_of(device);
	if (calm->bound_until && moment_us() >= calm->bound_until) {
		calm->bound_until = 0;
		turn_bound(device, 0);
	}
	pthread_mutex_unlock(&device->mover->lock);
}
