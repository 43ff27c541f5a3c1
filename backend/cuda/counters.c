// SPDX-License-Identifier: Apache-2.0
/*
 * Kernels submitted and finished.
 *
 * For each stream there is a number of launches behind which no marker has been placed yet, and a queue of markers, each an
 * event with the number of kernels before it. A lock each, taken on every launch by the thread that launches there: it
 * also keeps the stream and its context alive for the listening thread, since whoever destroys them takes it first.
 */

#include "counters.h"

#include <stdlib.h>
#include <time.h>

#include "driver.h"
#include "stream.h"

#define MS UINT64_C(1000000)
#define SPACING (2 * MS)	/* between markers in a stream */
#define MOST_UNMARKED 256	/* launches without a marker */
/* Recording an event waits where a channel has no room (about 1000 launches); the listening thread must not. */
#define ROOM 512
#define TRIES 4			/* to record a marker, before what it stood for counts as finished */
#define SLOWEST_MS 16		/* between looks at markers, none of which passes */

struct marker {
	struct marker *next;
	CUevent event;
	uint64_t kernels, launches;
	uint64_t first;		/* when the first of these was launched */
};

struct counted {
	struct counted *next;		/* all; under table_lock; never freed, used again */
	pthread_mutex_t lock;		/* for the rest */
	bool live;			/* stands for `key` */
	bool gone;			/* the stream was destroyed: only its markers are left */
	bool held;			/* the context may be about to go */
	bool captured;
	struct stream_key key;
	CUcontext context;
	struct device *device;
	uint64_t kernels, launches;	/* behind the last marker */
	uint64_t last, marked;		/* when something was launched, and a marker placed */
	int failures;
	struct marker *first, *newest;	/* in the order in which they pass */
	struct marker *spare;
};

void (*counters_wake)(void);

static struct counted *all;	/* atomically; prepended under table_lock */
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static bool asleep = true;	/* atomically: the listening thread will not look unless woken */
static int64_t outstanding;	/* atomically: launches not known to be finished */
static bool quick;		/* atomically: something was launched since the last tick */

/* By the program's number of the device. What the page shows is a copy. */
static struct { struct device *device; uint64_t submitted, finished; } totals[64]; /* under page_lock */
static struct counters_page *page;						   /* under page_lock */
static pthread_mutex_t page_lock = PTHREAD_MUTEX_INITIALIZER;

static __thread struct counted *recent[8]; /* by the stream's handle: where a thread's last launches went */

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000 * MS + (uint64_t)time.tv_nsec;
}

static void show(size_t ordinal)
{
	struct device *device = totals[ordinal].device;
	int index = device ? __atomic_load_n(&device->index, __ATOMIC_ACQUIRE) : -1;

	if (!page || index < 0 || index >= GG_DEVICES)
		return;
	/* Whoever reads the second finds no more in it than in the first, if he reads it first. */
	__atomic_store_n(&page->gpu[index].submitted, totals[ordinal].submitted, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].finished, totals[ordinal].finished, __ATOMIC_RELEASE);
}

static void add(struct device *device, uint64_t submitted, uint64_t finished)
{
	size_t ordinal = (size_t)device->ordinal;

	pthread_mutex_lock(&page_lock);
	totals[ordinal].device = device;
	totals[ordinal].submitted += submitted;
	totals[ordinal].finished += finished;
	show(ordinal);
	pthread_mutex_unlock(&page_lock);
}

void counters_share(struct counters_page *shared)
{
	pthread_mutex_lock(&page_lock);
	page = shared;
	for (size_t i = 0; i < sizeof(totals) / sizeof(totals[0]); i++)
		show(i);
	pthread_mutex_unlock(&page_lock);
}

/* All below with the stream's lock held, unless they say otherwise. */

static void finish(struct counted *counted, uint64_t kernels, uint64_t launches)
{
	if (!launches)
		return;
	__atomic_sub_fetch(&outstanding, (int64_t)launches, __ATOMIC_RELAXED);
	add(counted->device, 0, kernels);
}

static void finish_unmarked(struct counted *counted)
{
	finish(counted, counted->kernels, counted->launches);
	counted->kernels = counted->launches = 0;
}

static struct marker *marker_new(struct counted *counted)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	struct marker *marker = counted->spare;

	if (marker) {
		counted->spare = marker->next;
		return marker;
	}
	marker = malloc(sizeof(*marker));
	if (!marker)
		return NULL;
	/* A capture in global mode, in any thread, would be ended by a call that is not safe in it. */
	real.cuThreadExchangeStreamCaptureMode(&mode);
	if (real.cuEventCreate(&marker->event, CU_EVENT_DISABLE_TIMING)) {
		free(marker);
		marker = NULL;
	}
	real.cuThreadExchangeStreamCaptureMode(&mode);
	return marker;
}

static void marker_done(struct counted *counted, struct marker *marker)
{
	marker->next = counted->spare;
	counted->spare = marker;
}

static CUresult record(struct counted *counted, CUevent event)
{
	/* Handles 1 and 2 mean the same in every entry point: the legacy stream, and the thread's own. */
	return real.cuEventRecord(event, counted->key.stream);
}

/* Places a marker behind everything launched so far. In a current context that is the stream's. */
static bool mark(struct counted *counted, uint64_t time)
{
	struct marker *marker = marker_new(counted);

	if (!marker || record(counted, marker->event)) {
		if (marker)
			marker_done(counted, marker);
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

/* Behind every launch, where nobody else can or may do it later: moves the last marker on, if it is young. */
static bool mark_at_once(struct counted *counted, uint64_t time)
{
	struct marker *newest = counted->newest;

	if (!newest || time - newest->first >= SPACING)
		return mark(counted, time);
	if (record(counted, newest->event))
		return false;
	newest->kernels += counted->kernels;
	newest->launches += counted->launches;
	counted->kernels = counted->launches = 0;
	return true;
}

/* Its events go with the context (`destroyed`), or are given back. */
static void retire(struct counted *counted, bool destroyed)
{
	for (struct marker *marker = counted->spare, *next; marker; marker = next) {
		next = marker->next;
		if (!destroyed)
			real.cuEventDestroy_v2(marker->event);
		free(marker);
	}
	counted->spare = NULL;
	counted->live = counted->gone = counted->held = counted->captured = false;
	counted->failures = 0;
}

static void finish_everything(struct counted *counted)
{
	struct marker *marker;

	while ((marker = counted->first)) {
		counted->first = marker->next;
		finish(counted, marker->kernels, marker->launches);
		marker_done(counted, marker);
	}
	counted->newest = NULL;
	finish_unmarked(counted);
}

static bool is_for(const struct counted *counted, const struct stream_key *key)
{
	return counted->live && !counted->gone && stream_same(&counted->key, key);
}

/* Finds what stands for a stream and locks it; NULL: nothing does. No lock held. */
static struct counted *find(const struct stream_key *key)
{
	for (struct counted *counted = __atomic_load_n(&all, __ATOMIC_ACQUIRE); counted; counted = counted->next) {
		pthread_mutex_lock(&counted->lock);
		if (is_for(counted, key))
			return counted;
		pthread_mutex_unlock(&counted->lock);
	}
	return NULL;
}

/* One that stands for nothing, locked. */
static struct counted *unused(void)
{
	struct counted *counted;

	for (counted = all; counted; counted = counted->next) {
		pthread_mutex_lock(&counted->lock);
		if (!counted->live)
			return counted;
		pthread_mutex_unlock(&counted->lock);
	}
	counted = calloc(1, sizeof(*counted));
	if (!counted)
		return NULL;
	pthread_mutex_init(&counted->lock, NULL);
	pthread_mutex_lock(&counted->lock);
	counted->next = all;
	__atomic_store_n(&all, counted, __ATOMIC_RELEASE);
	return counted;
}

static struct counted *find_or_make(struct device *device, const struct stream_key *key)
{
	struct counted *counted;

	/* One maker at a time, so that no stream has two. */
	pthread_mutex_lock(&table_lock);
	counted = find(key);
	if (!counted)
		counted = unused();
	if (counted && !counted->live) {
		counted->live = true;
		counted->key = *key;
		counted->device = device;
		counted->context = key->context;
		if (!key->context && (!real.cuStreamGetCtx || real.cuStreamGetCtx(key->stream, &counted->context)))
			real.cuCtxGetCurrent(&counted->context);
		counted->marked = 0;
	}
	pthread_mutex_unlock(&table_lock);
	return counted;
}

static struct counted *of_stream(struct device *device, const struct stream_key *key)
{
	struct counted **slot = &recent[(((uintptr_t)key->stream >> 4) ^ (uintptr_t)key->stream) % 8];

	if (*slot) {
		pthread_mutex_lock(&(*slot)->lock);
		if (is_for(*slot, key))
			return *slot;
		pthread_mutex_unlock(&(*slot)->lock);
	}
	*slot = find_or_make(device, key);
	return *slot;
}

/* Without a lock: the listening thread may hold some, and wakes by itself. */
static void wake(void)
{
	void (*wake_up)(void) = __atomic_load_n(&counters_wake, __ATOMIC_ACQUIRE);

	__atomic_store_n(&quick, true, __ATOMIC_RELAXED);
	if (wake_up && __atomic_load_n(&asleep, __ATOMIC_SEQ_CST) && __atomic_exchange_n(&asleep, false, __ATOMIC_SEQ_CST))
		wake_up();
}

void counters_launched(struct device *device, CUstream stream, bool per_thread, uint64_t kernels)
{
	struct stream_key key;
	struct counted *counted;
	bool at_once;

	if (!kernels)
		return;
	if (!__atomic_load_n(&counters_wake, __ATOMIC_ACQUIRE)) {
		/* No thread, as there is no daemon: nobody would look at markers. */
		add(device, kernels, kernels);
		return;
	}
	state_enter();
	key = stream_key(stream, per_thread);
	counted = of_stream(device, &key);
	if (!counted) {
		/* No memory for the books: not to be waited for. */
		add(device, kernels, kernels);
		state_leave();
		return;
	}
	add(device, kernels, 0);
	__atomic_add_fetch(&outstanding, 1, __ATOMIC_RELAXED);
	counted->last = now();
	counted->kernels += kernels;
	counted->launches++;
	at_once = key.thread || stream_capturing_any();
	if (at_once)
		at_once = mark_at_once(counted, counted->last);
	else if (counted->last - counted->marked >= SPACING || counted->launches >= MOST_UNMARKED)
		mark(counted, counted->last);
	/* Nobody but this thread can mark its own stream, and it may not come back. */
	if (key.thread && !at_once)
		finish_unmarked(counted);
	pthread_mutex_unlock(&counted->lock);
	wake();
	state_leave();
}

/* Pushes the context of the stream; false: there is none that can be used. */
static bool enter_context(struct counted *counted)
{
	return counted->context && !real.cuCtxPushCurrent_v2(counted->context);
}

static void leave_context(void)
{
	CUcontext context;

	real.cuCtxPopCurrent_v2(&context);
}

static void mark_from_elsewhere(struct counted *counted)
{
	if (!counted->launches || counted->key.thread || counted->captured || !enter_context(counted))
		return;
	mark(counted, now());
	leave_context();
}

void counters_stream_gone(CUstream stream)
{
	struct stream_key key = stream_key(stream, false);
	struct counted *counted = find(&key);

	if (!counted)
		return;
	mark_from_elsewhere(counted);
	finish_unmarked(counted);
	counted->gone = true;
	counted->captured = false;
	pthread_mutex_unlock(&counted->lock);
	wake();
}

static void each_of(CUcontext context, void (*visit)(struct counted *))
{
	for (struct counted *counted = __atomic_load_n(&all, __ATOMIC_ACQUIRE); counted; counted = counted->next) {
		pthread_mutex_lock(&counted->lock);
		if (counted->live && counted->context == context)
			visit(counted);
		pthread_mutex_unlock(&counted->lock);
	}
}

static void hold(struct counted *counted)
{
	counted->held = true;
}

static void unhold(struct counted *counted)
{
	counted->held = false;
}

static void end(struct counted *counted)
{
	finish_everything(counted);
	retire(counted, true);
}

void counters_context_held(CUcontext context)
{
	each_of(context, hold);
}

void counters_context_gone(CUcontext context)
{
	each_of(context, end);
}

void counters_context_stays(CUcontext context)
{
	each_of(context, unhold);
	wake();
}

void counters_capture_begins(CUstream stream, bool per_thread)
{
	struct stream_key key = stream_key(stream, per_thread);

	for (struct counted *counted = __atomic_load_n(&all, __ATOMIC_ACQUIRE); counted; counted = counted->next) {
		pthread_mutex_lock(&counted->lock);
		if (counted->live && !counted->gone && !counted->held)
			mark_from_elsewhere(counted);
		if (is_for(counted, &key))
			counted->captured = true;
		pthread_mutex_unlock(&counted->lock);
	}
}

void counters_capture_ended(CUstream stream, bool per_thread)
{
	struct stream_key key = stream_key(stream, per_thread);
	struct counted *counted = find(&key);

	if (!counted)
		return;
	counted->captured = false;
	pthread_mutex_unlock(&counted->lock);
	wake();
}

/* Which markers have passed. An error other than NOT_READY is the end of the context's work: nothing runs any more. */
static bool look(struct counted *counted)
{
	struct marker *marker;
	bool passed = false;

	while ((marker = counted->first)) {
		if (real.cuEventQuery(marker->event) == CUDA_ERROR_NOT_READY)
			break;
		counted->first = marker->next;
		if (!counted->first)
			counted->newest = NULL;
		finish(counted, marker->kernels, marker->launches);
		marker_done(counted, marker);
		passed = true;
	}
	return passed;
}

/* The stream has been quiet: what is unmarked gets its marker now. */
static void mark_quiet(struct counted *counted)
{
	uint64_t time = now();

	if (!counted->launches || counted->key.thread || stream_capturing_any() || time - counted->last < SPACING)
		return;
	if (__atomic_load_n(&outstanding, __ATOMIC_RELAXED) - (int64_t)counted->launches >= ROOM && counted->first)
		return;
	if (!mark(counted, time) && ++counted->failures >= TRIES) {
		state_log("no marker can be placed in stream %p", (void *)counted->key.stream);
		finish_unmarked(counted);
	}
}

/* True: there is something to come back for. */
static bool tick(struct counted *counted, bool *passed)
{
	bool more = true;

	if (!counted->live)
		return false;
	/* Whoever holds or captures it wakes this thread afterwards. */
	if (counted->held || counted->captured)
		return false;
	if (!counted->first && !counted->launches && !counted->gone)
		return false;
	if (!enter_context(counted)) {
		/* A context of which nobody told us that it is gone. */
		end(counted);
		return false;
	}
	*passed |= look(counted);
	if (!counted->gone)
		mark_quiet(counted);
	if (!counted->first && !counted->launches) {
		more = false;
		/* A thread's own stream may never be used again, nor be destroyed by a call. */
		if (counted->gone || counted->key.thread)
			retire(counted, false);
	}
	leave_context();
	return more;
}

int counters_tick(void)
{
	static __thread bool relaxed;
	static int wait = 2; /* of the listening thread alone */
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	bool more = false, passed = false;

	state_enter();
	/* This thread's calls must not end anybody's capture. */
	if (!relaxed && real.cuThreadExchangeStreamCaptureMode)
		relaxed = !real.cuThreadExchangeStreamCaptureMode(&mode);
	/* Before the look: what is launched meanwhile wakes. */
	__atomic_store_n(&asleep, true, __ATOMIC_SEQ_CST);
	for (struct counted *counted = __atomic_load_n(&all, __ATOMIC_ACQUIRE); counted; counted = counted->next) {
		pthread_mutex_lock(&counted->lock);
		more |= tick(counted, &passed);
		pthread_mutex_unlock(&counted->lock);
	}
	state_leave();
	if (!more)
		return -1;
	__atomic_store_n(&asleep, false, __ATOMIC_SEQ_CST);
	if (__atomic_exchange_n(&quick, false, __ATOMIC_RELAXED) || passed)
		wait = 2;
	else if (wait < SLOWEST_MS)
		wait *= 2;
	return wait;
}

void counters_forget(void)
{
	table_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	page_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	all = NULL;
	page = NULL;
	outstanding = 0;
	asleep = true;
	for (size_t i = 0; i < sizeof(totals) / sizeof(totals[0]); i++)
		totals[i].device = NULL, totals[i].submitted = totals[i].finished = 0;
	for (size_t i = 0; i < sizeof(recent) / sizeof(recent[0]); i++)
		recent[i] = NULL;
}
