// SPDX-License-Identifier: Apache-2.0
#include "marker.h"

#include <stdlib.h>

#include "driver.h"
#include "log.h"
#include "moment.h"
#include "totals.h"

#define SPACING 2000		/* us between markers in a stream */
#define MOST_UNMARKED 256	/* launches without a marker */
/* Recording an event waits where a channel has no room (about 1000 launches); the
 * listening thread must not. */
#define ROOM 512
/* To record a marker, before what it stood for counts as finished. */
#define TRIES 4

struct marker {
	struct marker *next;
	CUevent event;
	uint64_t kernels, launches;
	uint64_t first;		/* when the first of these was launched; us */
};

static int64_t outstanding;	/* atomically: launches not known to be finished */

static void finish(struct counted *counted, uint64_t kernels, uint64_t launches)
{
	if (!launches)
		return;
	__atomic_sub_fetch(&outstanding, (int64_t)launches, __ATOMIC_RELAXED);
	totals_add(counted->device, 0, kernels);
}

void marker_finish_unmarked(struct counted *counted)
{
	finish(counted, counted->kernels, counted->launches);
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

static CUresult record(struct counted *counted, CUevent event)
{
	/* Handles 1 and 2 mean the same in every entry point: the legacy stream,
	 * and the thread's own. */
	return real.cuEventRecord(event, counted->key.stream);
}

/* The first of the queue has. */
static void pass(struct counted *counted)
{
	struct marker *marker = counted->first;

	counted->first = marker->next;
	if (!counted->first)
		counted->newest = NULL;
	finish(counted, marker->kernels, marker->launches);
	done(counted, marker);
}

void marker_finish_all(struct counted *counted)
{
	while (counted->first)
		pass(counted);
	marker_finish_unmarked(counted);
}

bool marker_look(struct counted *counted)
{
	bool passed = false;

	/* An error other than NOT_READY is the end of the context's work: nothing runs any more. */
	while (counted->first && real.cuEventQuery(counted->first->event) != CUDA_ERROR_NOT_READY) {
		pass(counted);
		passed = true;
	}
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

void marker_place_quiet(struct counted *counted, bool over)
{
	uint64_t time = moment_us();

	if (!counted->launches || counted->key.thread || stream_capturing_any() ||
	    (!over && time - counted->last < SPACING))
		return;
	if (__atomic_load_n(&outstanding, __ATOMIC_RELAXED) - (int64_t)counted->launches >= ROOM &&
	    counted->first)
		return;
	if (!marker_place(counted, time) && ++counted->failures >= TRIES) {
		log_line("no marker can be placed in stream %p", (void *)counted->key.stream);
		marker_finish_unmarked(counted);
	}
}

/* Whether so many kernels are to have a marker behind them, however soon that is. */
static bool is_due(const struct counted *counted, uint64_t kernels)
{
	const uint64_t every = __atomic_load_n(&counted->device->mark_every, __ATOMIC_RELAXED);

	return every && kernels >= every;
}

/* Behind every launch, where no other thread can or may do it later: moves the last marker
 * on, if it is young. */
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
	counted->last = moment_us();
	counted->kernels += kernels;
	counted->launches++;
	at_once = counted->key.thread || stream_capturing_any();
	if (at_once)
		at_once = place_at_once(counted, counted->last);
	else if (counted->last - counted->marked >= SPACING || counted->launches >= MOST_UNMARKED ||
		 is_due(counted, counted->kernels))
		marker_place(counted, counted->last);
	/* No thread but this can mark its own stream, and it may not come back. */
	if (counted->key.thread && !at_once)
		marker_finish_unmarked(counted);
}

void marker_forget(void)
{
	outstanding = 0;
}
