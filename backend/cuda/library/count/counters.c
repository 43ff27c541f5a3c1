// SPDX-License-Identifier: Apache-2.0
/*
 * The streams whose kernels are counted, and the times to look at what they have finished (marker.h).
 *
 * Each stream has a lock, taken on every launch by the thread that launches there. The lock also keeps the stream and
 * its context alive for the listening thread, since a thread that destroys them takes it first. A `struct counted` that
 * is passed to a function here is locked, unless stated otherwise.
 *
 * A thread that places a marker may hold the lock until its stream has room, and that may need work of another thread.
 * So `live`, `key`, `context` and `device` are written atomically (WRITE): a thread locks the streams alone that it is
 * about, and the listening thread, which is about all, comes back to one that is locked.
 */

#include "counters.h"

#include <sched.h>
#include <stdlib.h>

#include "driver.h"
#include "life.h"
#include "marker.h"
#include "moment.h"
#include "ours.h"
#include "totals.h"

#define SLOWEST_MS 16		/* milliseconds between looks at markers none of which passes */

void (*counters_wake)(void);

static struct counted *all;	/* atomically; prepended under `lock` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool asleep = true;	/* atomically: the listening thread does not look until it is woken */
static bool quick;		/* atomically: something was launched since the last tick */

/* By stream handle: the streams of a thread's last launches. */
static __thread struct counted *recent[8];

static struct counted *first(void)
{
	return __atomic_load_n(&all, __ATOMIC_ACQUIRE);
}

#define READ(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define WRITE(field, value) __atomic_store_n(&(field), value, __ATOMIC_RELAXED)

static bool is_live(const struct counted *counted)
{
	return __atomic_load_n(&counted->live, __ATOMIC_ACQUIRE);
}

static bool is_for(const struct counted *counted, const struct stream_key *key)
{
	return counted->live && !counted->gone && stream_same(&counted->key, key);
}

/* Whether it may be for a stream; not locked. */
static bool may_be_for(const struct counted *counted, const struct stream_key *key)
{
	return is_live(counted) && READ(counted->key.stream) == key->stream &&
	       READ(counted->key.context) == key->context && READ(counted->key.thread) == key->thread;
}

/* Find and lock the entry of a stream; NULL for none. No lock held. */
static struct counted *find(const struct stream_key *key)
{
	for (struct counted *counted = first(); counted; counted = counted->next) {
		if (!may_be_for(counted, key))
			continue;
		pthread_mutex_lock(&counted->lock);
		if (is_for(counted, key))
			return counted;
		pthread_mutex_unlock(&counted->lock);
	}
	return NULL;
}

/* Return an unused entry, locked. */
static struct counted *unused(void)
{
	struct counted *counted;

	for (counted = all; counted; counted = counted->next) {
		if (is_live(counted))
			continue;
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
	CUcontext context;

	/* One maker at a time, so that no stream gets two entries. */
	pthread_mutex_lock(&lock);
	counted = find(key);
	if (!counted)
		counted = unused();
	if (counted && !counted->live) {
		context = key->context;
		if (!context && (!real.cuStreamGetCtx || real.cuStreamGetCtx(key->stream, &context)))
			real.cuCtxGetCurrent(&context);
		WRITE(counted->key.stream, key->stream);
		WRITE(counted->key.context, key->context);
		WRITE(counted->key.thread, key->thread);
		WRITE(counted->context, context);
		WRITE(counted->device, device);
		counted->marked = 0;
		__atomic_store_n(&counted->live, true, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lock);
	return counted;
}

static struct counted *of_stream(struct device *device, const struct stream_key *key)
{
	const uintptr_t handle = (uintptr_t)key->stream;
	struct counted **slot = &recent[(handle >> 4 ^ handle) % 8];

	if (*slot && may_be_for(*slot, key)) {
		pthread_mutex_lock(&(*slot)->lock);
		if (is_for(*slot, key))
			return *slot;
		pthread_mutex_unlock(&(*slot)->lock);
	}
	*slot = find_or_make(device, key);
	return *slot;
}

/* Without a lock: the listening thread may hold some, and needs no wake-up then. */
static void wake(void)
{
	void (*wake_up)(void) = __atomic_load_n(&counters_wake, __ATOMIC_ACQUIRE);

	__atomic_store_n(&quick, true, __ATOMIC_RELAXED);
	if (wake_up && __atomic_load_n(&asleep, __ATOMIC_SEQ_CST) &&
	    __atomic_exchange_n(&asleep, false, __ATOMIC_SEQ_CST))
		wake_up();
}

void counters_launched(struct device *device, CUstream stream, bool per_thread, uint64_t kernels)
{
	struct stream_key key;
	struct counted *counted;

	if (!kernels)
		return;
	if (!__atomic_load_n(&counters_wake, __ATOMIC_ACQUIRE)) {
		/* There is no daemon and so no thread that would look at markers. */
		totals_add(device, kernels, kernels);
		return;
	}
	ours_enter();
	key = stream_key_in(device_context(), stream, per_thread);
	counted = of_stream(device, &key);
	if (!counted) {
		/* No memory to count in: it counts as finished at once. */
		totals_add(device, kernels, kernels);
		ours_leave();
		return;
	}
	totals_add(device, kernels, 0);
	marker_launched(counted, kernels);
	pthread_mutex_unlock(&counted->lock);
	wake();
	ours_leave();
}

/* Push the context of the stream; false where none can be used. */
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
	if (!counted->launches || counted->key.thread || counted->captured ||
	    !enter_context(counted))
		return;
	marker_place(counted, moment_us());
	leave_context();
}

void counters_stream_gone(CUstream stream)
{
	struct stream_key key = stream_key(stream, false);
	struct counted *counted = find(&key);

	if (!counted)
		return;
	mark_from_elsewhere(counted);
	marker_finish_unmarked(counted);
	counted->gone = true;
	counted->captured = false;
	pthread_mutex_unlock(&counted->lock);
	wake();
}

static void each_of(CUcontext context, void (*visit)(struct counted *))
{
	for (struct counted *counted = first(); counted; counted = counted->next) {
		if (!is_live(counted) || READ(counted->context) != context)
			continue;
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

/* Free an entry; `destroyed`: its context is. */
static void retire(struct counted *counted, bool destroyed)
{
	marker_drop(counted, destroyed);
	counted->gone = counted->held = counted->captured = false;
	__atomic_store_n(&counted->live, false, __ATOMIC_RELEASE);
	counted->failures = 0;
}

static void end(struct counted *counted)
{
	marker_finish_all(counted);
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

/* Lock what is locked for a moment at most; false where a thread places a marker, which may wait for this one. */
static bool lock_soon(struct counted *counted)
{
	while (pthread_mutex_trylock(&counted->lock)) {
		if (READ(counted->places))
			return false;
		sched_yield();
	}
	return true;
}

void counters_capture_begins(CUstream stream, bool per_thread)
{
	struct stream_key key = stream_key(stream, per_thread);

	for (struct counted *counted = first(); counted; counted = counted->next) {
		if (may_be_for(counted, &key))
			pthread_mutex_lock(&counted->lock);
		else if (!is_live(counted) || !lock_soon(counted))
			continue;
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

/* Return whether there is a reason to come back. `over`: nothing more is launched there. */
static bool tick(struct counted *counted, bool over, bool *passed)
{
	bool more = true;

	if (!counted->live)
		return false;
	/* The thread that holds or captures the stream wakes this one afterwards. */
	if (counted->held || counted->captured)
		return false;
	if (!counted->first && !counted->launches && !counted->gone && !counted->key.thread)
		return false;
	if (!enter_context(counted)) {
		/* A context that was destroyed without a call that was caught. */
		end(counted);
		return false;
	}
	*passed |= marker_look(counted);
	if (!counted->gone)
		marker_place_quiet(counted, over);
	if (!counted->first && !counted->launches) {
		more = false;
		/* A thread's own stream may never be used again, nor be destroyed by a call. */
		if (counted->gone || counted->key.thread)
			retire(counted, false);
	}
	leave_context();
	return more;
}

bool counters_drain(struct device *device)
{
	const CUstreamCaptureMode mode = driver_enter();
	bool more = false, passed = false;

	for (struct counted *counted = first(); counted; counted = counted->next) {
		if (!is_live(counted) || READ(counted->device) != device)
			continue;
		if (pthread_mutex_trylock(&counted->lock)) {
			more = true;
			continue;
		}
		if (counted->live && counted->device == device)
			more |= tick(counted, true, &passed);
		pthread_mutex_unlock(&counted->lock);
	}
	driver_leave(mode);
	return !more;
}

void counters_all_finished(struct device *device)
{
	for (struct counted *counted = first(); counted; counted = counted->next) {
		if (!is_live(counted) || READ(counted->device) != device)
			continue;
		pthread_mutex_lock(&counted->lock);
		if (counted->live && counted->device == device)
			marker_finish_all(counted);
		pthread_mutex_unlock(&counted->lock);
	}
}

bool counters_progress(struct device *device)
{
	bool passed = false;

	for (struct counted *counted = first(); counted; counted = counted->next) {
		if (!is_live(counted) || READ(counted->device) != device || pthread_mutex_trylock(&counted->lock))
			continue;
		if (counted->live && counted->device == device && counted->first && !counted->held &&
		    !counted->captured && enter_context(counted)) {
			passed |= marker_look(counted);
			leave_context();
		}
		pthread_mutex_unlock(&counted->lock);
	}
	return passed;
}

void counters_mark(CUstream stream, bool per_thread)
{
	CUstreamCaptureMode mode;
	struct stream_key key;
	struct counted *counted;

	/* Another stream may join a capture at any time; the caller's own does not while the caller launches there. */
	if (stream_capturing_any())
		return;
	mode = driver_enter();
	key = stream_key(stream, per_thread);
	counted = find(&key);
	if (counted) {
		if (!counted->held)
			mark_from_elsewhere(counted);
		pthread_mutex_unlock(&counted->lock);
	}
	driver_leave(mode);
}

int counters_tick(void)
{
	static __thread bool relaxed;
	static int wait = 2; /* of the listening thread alone */
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	bool more = false, passed = false;

	ours_enter();
	/* Calls of this thread must not end a capture of the program. */
	if (!relaxed && real.cuThreadExchangeStreamCaptureMode)
		relaxed = !real.cuThreadExchangeStreamCaptureMode(&mode);
	/* Before the look: a launch during it wakes this thread. */
	__atomic_store_n(&asleep, true, __ATOMIC_SEQ_CST);
	for (struct counted *counted = first(); counted; counted = counted->next) {
		if (!is_live(counted))
			continue;
		if (pthread_mutex_trylock(&counted->lock)) {
			more = true;
			continue;
		}
		more |= tick(counted, false, &passed);
		pthread_mutex_unlock(&counted->lock);
	}
	ours_leave();
	if (!more)
		return -1;
	__atomic_store_n(&asleep, false, __ATOMIC_SEQ_CST);
	if (__atomic_exchange_n(&quick, false, __ATOMIC_RELAXED) || passed)
		wait = 2;
	else if (wait < SLOWEST_MS)
		wait *= 2;
	return wait;
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	all = NULL;
	asleep = true;
	counters_wake = NULL;
	for (size_t i = 0; i < sizeof(recent) / sizeof(recent[0]); i++)
		recent[i] = NULL;
	marker_forget();
	totals_forget();
}

LIFE(.stage = LIFE_COUNTS, .forget = forget);
