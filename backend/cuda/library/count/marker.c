// SPDX-License-Identifier: Apache-2.0
#include "marker.h"

#include <stdlib.h>

#include "detour.h"
#include "driver.h"
#include "log.h"
#include "moment.h"
#include "totals.h"

#define SPACING 2000		/* us between markers in a stream */
/* us without a launch after which the last launch gets a marker while run-ahead is bounded. Pending work counts towards
 * a quota, so the end of the last kernel has to be seen at once. */
#define SPACING_BOUNDED 500
#define MOST_UNMARKED 256	/* launches without a marker */
/* Launches in a stream between two readings of the clock, which costs more than the rest of what is done here, while
 * run-ahead is not bounded. Those of a stream with fewer in SPACING get their marker from the listening thread. */
#define READ_EVERY 8
/* Most markers pending in one stream. Recording an event blocks when a channel has no room (about 1000 launches), and
 * the listening thread must not block. */
#define ROOM 512
/* Attempts to record a marker before the launches that it stands for count as finished. */
#define TRIES 4

struct marker {
	struct marker *next;
	CUevent event;
	uint64_t kernels, launches;
	uint64_t first;		/* when the first of these launches was made; us */
};

static int64_t outstanding;	/* atomically: launches not known to be finished */

static void finish(struct counted *counted, uint64_t kernels, uint64_t launches, uint64_t at)
{
	if (!launches)
		return;
	__atomic_sub_fetch(&outstanding, (int64_t)launches, __ATOMIC_RELAXED);
	totals_finish(counted->device, kernels, at);
}

void marker_finish_unmarked(struct counted *counted)
{
	finish(counted, counted->kernels, counted->launches, moment_us());
	counted->kernels = counted->launches = 0;
}

static struct marker *make(struct counted *counted)
{
	CUstreamCaptureMode mode;
	struct marker *marker = counted->spare;

	if (marker) {
		counted->spare = marker->next;
		return marker;
	}
	marker = malloc(sizeof(*marker));
	if (!marker)
		return NULL;
	mode = driver_enter();
	if (real.cuEventCreate(&marker->event, CU_EVENT_DISABLE_TIMING)) {
		free(marker);
		marker = NULL;
	}
	driver_leave(mode);
	return marker;
}

static void done(struct counted *counted, struct marker *marker)
{
	marker->next = counted->spare;
	counted->spare = marker;
}

/* Bring the stream home, so that a marker in it is behind its launches. False, at once, while a thread launches
 * there. */
static bool is_home(const struct counted *counted)
{
	return !detour_on() || counted->key.thread || detour_home_at_once(counted->key.stream, counted->context);
}

static CUresult record(struct counted *counted, CUevent event)
{
	CUresult result;

	if (!is_home(counted))
		return CUDA_ERROR_NOT_READY;
	__atomic_store_n(&counted->places, true, __ATOMIC_RELAXED);
	/* Handles 1 and 2 mean the same in every entry point: the legacy stream and the thread's own stream. */
	result = real.cuEventRecord(event, counted->key.stream);
	__atomic_store_n(&counted->places, false, __ATOMIC_RELAXED);
	return result;
}

/* Takes the first marker off the queue, as passed at about `at`. */
static void pass(struct counted *counted, uint64_t at)
{
	struct marker *marker = counted->first;

	counted->first = marker->next;
	if (!counted->first)
		counted->newest = NULL;
	finish(counted, marker->kernels, marker->launches, at);
	done(counted, marker);
}

void marker_finish_all(struct counted *counted)
{
	while (counted->first)
		pass(counted, moment_us());
	marker_finish_unmarked(counted);
}

bool marker_look(struct counted *counted)
{
	const uint64_t now = moment_us();
	uint64_t before = counted->looked;
	bool passed = false;

	/* An error other than NOT_READY means the end of the context: nothing runs there any more. */
	while (counted->first && real.cuEventQuery(counted->first->event) != CUDA_ERROR_NOT_READY) {
		if (before < counted->first->first)
			before = counted->first->first;
		/* The marker passed at some moment since the previous look; the middle is too early as often as too
		 * late. */
		pass(counted, now - (now > before ? now - before : 0) / 2);
		passed = true;
	}
	counted->looked = now;
	return passed;
}

void marker_drop(struct counted *counted, bool destroyed)
{
	for (struct marker *marker = counted->spare, *next; marker; marker = next) {
		next = marker->next;
		if (!destroyed)
			real.cuEventDestroy_v2(marker->event);
		free(marker);
	}
	counted->spare = NULL;
}

bool marker_place(struct counted *counted, uint64_t time)
{
	struct marker *marker = make(counted);

	if (!marker || record(counted, marker->event)) {
		if (marker)
			done(counted, marker);
		return false;
	}
	marker->next = NULL;
	marker->kernels = counted->kernels;
	marker->launches = counted->launches;
	marker->first = time;
	if (counted->newest)
		counted->newest->next = marker;
	else
		counted->first = marker;
	counted->newest = marker;
	counted->kernels = counted->launches = 0;
	counted->marked = time;
	counted->failures = 0;
	return true;
}

/* Whether run-ahead is bounded: when a launch was made, and when a marker passes, has to be known for each. */
static bool is_bounded(const struct counted *counted)
{
	return __atomic_load_n(&counted->device->mark_every, __ATOMIC_RELAXED);
}

void marker_place_quiet(struct counted *counted, bool over)
{
	const uint64_t time = moment_us();

	if (!counted->launches || counted->key.thread || stream_capturing_any() ||
	    (!over && time - counted->last < (is_bounded(counted) ? SPACING_BOUNDED : SPACING)))
		return;
	if (__atomic_load_n(&outstanding, __ATOMIC_RELAXED) - (int64_t)counted->launches >= ROOM &&
	    counted->first)
		return;
	if (!is_home(counted))
		return;
	if (!marker_place(counted, time) && ++counted->failures >= TRIES) {
		log_line("no marker can be placed in stream %p", (void *)counted->key.stream);
		marker_finish_unmarked(counted);
	}
}

/* Whether `kernels` are enough to need a marker behind them, however short the time since the last one. */
static bool is_due(const struct counted *counted, uint64_t kernels)
{
	const uint64_t every = __atomic_load_n(&counted->device->mark_every, __ATOMIC_RELAXED);

	return every && kernels >= every;
}

/* Places a marker behind every launch where no other thread can or may do so later; a young last marker is moved on
 * instead. */
static bool place_at_once(struct counted *counted, uint64_t time)
{
	struct marker *newest = counted->newest;

	if (!newest || time - newest->first >= SPACING || is_due(counted, newest->kernels))
		return marker_place(counted, time);
	if (record(counted, newest->event))
		return false;
	newest->kernels += counted->kernels;
	newest->launches += counted->launches;
	counted->kernels = counted->launches = 0;
	return true;
}

void marker_launched(struct counted *counted, uint64_t kernels)
{
	bool at_once;

	__atomic_add_fetch(&outstanding, 1, __ATOMIC_RELAXED);
	counted->kernels += kernels;
	counted->launches++;
	at_once = counted->key.thread || stream_capturing_any();
	if (at_once || counted->launches % READ_EVERY == 1 || counted->launches >= MOST_UNMARKED ||
	    is_bounded(counted))
		counted->last = moment_us();
	if (at_once)
		at_once = place_at_once(counted, counted->last);
	else if (counted->last - counted->marked >= SPACING || counted->launches >= MOST_UNMARKED ||
		 is_due(counted, counted->kernels))
		marker_place(counted, counted->last);
	/* Only this thread can mark its own stream, and it may never come back. */
	if (counted->key.thread && !at_once)
		marker_finish_unmarked(counted);
}

void marker_forget(void)
{
	outstanding = 0;
}
