// SPDX-License-Identifier: Apache-2.0
/*
 * A thread that waits has no lock and is not inside the gate: it sleeps in futex(2) on the word of its GPU. So memory
 * moves meanwhile; a handler of a signal may fork there; and nothing is left behind by a thread that ends.
 *
 * Run-ahead is what is pending, by the counters, times what a kernel took lately. A kernel may wait for another one
 * that its program has yet to launch: so a wait ends after the bound, or twice the time that one took before, without
 * anything that finishes, and the next such wait is half as long, of whichever thread.
 *
 * `lock` is taken with no other but that of totals.c after it.
 */

#include "turn.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "burst.h"
#include "counters.h"
#include "driver.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "ours.h"
#include "quiet.h"
#include "stream.h"
#include "totals.h"

/* Microseconds. */
#define DRAIN_MOST 1000000	/* for which the listening thread waits: it does nothing else then */
#define DRAIN_LEAST 2000	/* to learn whether something runs: another thread asks the driver */
#define RUN_AHEAD_MOST 10000000
#define LOOK_LEAST 50		/* between two looks what has finished */
#define LOOK_MOST 1000
#define PATIENCE_MOST 250000	/* for which a launch waits without anything that finishes, where the bound is less */
/* Bounds for which one launch waits, while others finish; and twice its patience, at least. */
#define BOUNDS_MOST 16
/* Waits in vain that are counted. */
#define VAIN_MOST 63
/* Parts of the bound that have a marker each: what was launched at once is heard of in these, and not when all of it
 * has finished and the GPU has nothing left to do. */
#define MARKS 8
/* For which what runs after the end of a turn is looked at in LOOK_DRAIN. */
#define DRAIN_WATCHED 50000
#define LOOK_DRAIN 200
#define LOOKS_DRAIN 5		/* until the listening thread hears what the daemon says */
/* Finished kernels in which a longer gap is forgotten, about: more than run at once. */
#define GAPS 64

enum { OPEN, CLOSED };

/* What is known of how fast kernels finish on a GPU, while its run-ahead is bounded. */
struct pace {
	uint64_t finished, since;	/* so many have, by that moment, or did when the GPU was last idle; us */
	uint64_t kernel_ns;		/* that one took lately, on the average; 0: not known */
	uint64_t gap_us;		/* the longest lately in which none finished, but some were pending;
					 * 0: not known */
	unsigned int vain;		/* waits, since then, in which none finished */
};

static struct turn {
	uint32_t word;		/* atomically: OPEN, CLOSED; threads sleep on it */
	uint64_t run_ahead_us;	/* atomically; 0: not bounded */
	uint64_t bound_us;	/* ... beside that: for memory to move */
	uint64_t yield_us;	/* ... of what waits behind a kernel that runs */
	unsigned int waiting;	/* atomically */
	bool seen;		/* of the listening thread: each thread inside has seen that it is closed */
	bool drained;		/* atomically: nothing has run since */
	uint64_t closed_at;	/* atomically: when it was closed last; us */
	struct device *device;	/* atomically; NULL before its first turn */
	struct pace pace;	/* under `lock` */
} turns[GG_ORDINALS];

unsigned int turn_any;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_closed(const struct turn *turn)
{
	return __atomic_load_n(&turn->word, __ATOMIC_ACQUIRE) == CLOSED;
}

static uint64_t lower(uint64_t one, uint64_t other)
{
	return one && other ? one < other ? one : other : one + other;
}

/* The lower bound of all that is pending, in microseconds; 0: there is none. */
static uint64_t bound_of_all(const struct turn *turn)
{
	return lower(__atomic_load_n(&turn->run_ahead_us, __ATOMIC_RELAXED),
		     __atomic_load_n(&turn->bound_us, __ATOMIC_RELAXED));
}

/* How far ahead it may be, in microseconds; 0: as far as the driver lets it. */
static uint64_t bound_of(const struct turn *turn)
{
	return lower(bound_of_all(turn), __atomic_load_n(&turn->yield_us, __ATOMIC_RELAXED));
}

/* Sleeps while the word is `word`, at most so long; 0: for ever. Spurious returns are harmless. */
static void sleep_while(struct turn *turn, uint32_t word, uint64_t us)
{
	const struct timespec time = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };

	__atomic_add_fetch(&turn->waiting, 1, __ATOMIC_RELAXED);
	syscall(SYS_futex, &turn->word, FUTEX_WAIT_PRIVATE, word, us ? &time : NULL, NULL, 0);
	__atomic_sub_fetch(&turn->waiting, 1, __ATOMIC_RELAXED);
}

static void pause_for(uint64_t us)
{
	const struct timespec time = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };

	nanosleep(&time, NULL);
}

/* Two threads may be at it, for a turn and for memory that moves. */
static void count_any(void)
{
	unsigned int any = 0;

	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < GG_ORDINALS; i++)
		any += is_closed(&turns[i]) || bound_of(&turns[i]);
	__atomic_store_n(&turn_any, any, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&lock);
}

static void set(struct turn *turn, uint32_t word, uint64_t run_ahead_us)
{
	__atomic_store_n(&turn->run_ahead_us, run_ahead_us, __ATOMIC_SEQ_CST);
	__atomic_store_n(&turn->word, word, __ATOMIC_SEQ_CST);
	count_any();
	syscall(SYS_futex, &turn->word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* The GPU that `stream` is of; NULL: none that is known. A copy may go to a stream of a context that is not current. */
static struct turn *of_stream(CUstream stream, bool per_thread)
{
	CUcontext context = NULL, current = NULL;
	CUdevice ordinal = -1;

	ours_enter();
	if (stream && stream != CU_STREAM_LEGACY && !stream_is_own(stream, per_thread) && real.cuStreamGetCtx &&
	    real.cuStreamGetCtx(stream, &context))
		context = NULL;
	if (real.cuCtxGetCurrent(&current))
		current = NULL;
	if (context && context != current && !real.cuCtxPushCurrent_v2(context)) {
		if (real.cuCtxGetDevice(&ordinal))
			ordinal = -1;
		real.cuCtxPopCurrent_v2(&context);
	} else if (current && real.cuCtxGetDevice(&ordinal)) {
		ordinal = -1;
	}
	ours_leave();
	return ordinal >= 0 && ordinal < GG_ORDINALS ? &turns[ordinal] : NULL;
}

/* Run-ahead */

/* What has finished by `now`, with some still pending or not. `watched`: there were some a moment ago. */
static void learn(struct pace *pace, uint64_t finished, bool pending, bool watched, uint64_t now)
{
	const uint64_t gap_us = now - pace->since, took_ns = gap_us * 1000 / (finished - pace->finished);
	/* Else all may have finished long ago: it was that long at most. */
	const bool sure = pending || watched;

	if (sure || !pace->kernel_ns || took_ns < pace->kernel_ns)
		pace->kernel_ns = pace->kernel_ns ? (pace->kernel_ns + took_ns) / 2 : took_ns;
	pace->kernel_ns += !pace->kernel_ns;
	if (gap_us < pace->gap_us)
		pace->gap_us -= (pace->gap_us - gap_us) / GAPS;
	else if (sure)
		pace->gap_us = gap_us;
	pace->finished = finished;
	pace->since = now;
	pace->vain = 0;
}

static uint64_t mark_every(const struct pace *pace, uint64_t bound_us)
{
	const uint64_t kernels = pace->kernel_ns ? bound_us * 1000 / MARKS / pace->kernel_ns : 0;

	return bound_us && !kernels ? 1 : kernels;
}

/* Whether so many kernels would take longer than a bound, by what is known; one that is not known does. */
static bool takes_longer(const struct pace *pace, uint64_t kernels, uint64_t bound_us)
{
	return bound_us && kernels && (!pace->kernel_ns || kernels * pace->kernel_ns > bound_us * 1000);
}

/* Whether what is pending would take longer than a bound, by what is known now. */
static bool is_ahead(struct turn *turn, struct device *device, bool watched)
{
	const uint64_t bound_us = bound_of_all(turn);
	const uint64_t yield_us = __atomic_load_n(&turn->yield_us, __ATOMIC_RELAXED);
	struct pace *pace = &turn->pace;
	uint64_t submitted, finished, pending, now;
	bool ahead;

	totals_get(device, &submitted, &finished);
	pthread_mutex_lock(&lock);
	now = moment_us();
	pending = submitted > finished ? submitted - finished : 0;
	if (finished > pace->finished)
		learn(pace, finished, pending, watched, now);
	if (!pending)
		pace->since = now;	/* what comes next did not wait for anything */
	__atomic_store_n(&device->mark_every, mark_every(pace, lower(bound_us, yield_us)), __ATOMIC_RELAXED);
	ahead = takes_longer(pace, pending, bound_us) || takes_longer(pace, pending - (pending > 0), yield_us);
	pthread_mutex_unlock(&lock);
	return ahead;
}

/* Outside, it asks the driver as a program does that waits for work: not while the program stands by. */
static void look(struct device *device)
{
	CUstreamCaptureMode mode;

	gate_wait_enter();
	mode = driver_enter();
	counters_progress(device);
	driver_leave(mode);
	gate_wait_leave();
}

/* How long nothing may finish until a launch is let go: it may be what the others wait for. */
static uint64_t patience_of(const struct pace *pace, uint64_t bound_us)
{
	uint64_t patience = pace->gap_us && pace->gap_us < PATIENCE_MOST / 2 ? 2 * pace->gap_us : PATIENCE_MOST;

	return patience > bound_us ? patience : bound_us;
}

/* Waits, outside, until it is no more so far ahead. */
static void fall_back(struct turn *turn, struct device *device)
{
	const uint64_t bound_us = bound_of(turn), start = moment_us();
	const uint64_t pause = bound_us / 16 < LOOK_LEAST ? LOOK_LEAST :
			       bound_us / 16 > LOOK_MOST ? LOOK_MOST : bound_us / 16;
	struct pace *pace = &turn->pace;
	uint64_t now, since, patience, last, finished;
	unsigned int vain;

	pthread_mutex_lock(&lock);
	patience = patience_of(pace, bound_us);
	vain = pace->vain;
	finished = pace->finished;
	pthread_mutex_unlock(&lock);
	last = start + (bound_us * BOUNDS_MOST > patience * 2 ? bound_us * BOUNDS_MOST : patience * 2);
	for (since = start;; sleep_while(turn, OPEN, pause)) {
		bool in_vain;

		look(device);
		if (!is_ahead(turn, device, true))
			return;
		now = moment_us();
		pthread_mutex_lock(&lock);
		if (pace->finished != finished) {
			finished = pace->finished;
			vain = pace->vain;
			since = now;
		}
		/* A pause at least: where a kernel takes far longer than those before, all that is let go is run
		 * ahead. */
		in_vain = now - since >= (patience >> vain > pause ? patience >> vain : pause);
		/* One of the threads that wait at once says it for all. */
		if (in_vain && pace->vain == vain)
			pace->vain += vain < VAIN_MOST;
		pthread_mutex_unlock(&lock);
		if (in_vain || now >= last || is_closed(turn))
			return;
	}
}

/* Holding */

/* Whether work for the stream is captured: it runs later, and its capture must come to an end. */
static bool is_captured(enum turn_work work, CUstream stream, bool per_thread)
{
	return work == TURN_JOINS ? stream_capturing_any() : !stream_runs(stream, per_thread);
}

bool turn_hold(enum turn_work work, CUstream stream, bool per_thread)
{
	struct turn *turn = gate_nested() ? NULL : of_stream(stream, per_thread);
	bool waited = false, fell_back = false;
	struct device *device;

	while (turn && !is_captured(work, stream, per_thread)) {
		const bool closed = is_closed(turn);
		const CUdevice ordinal = (CUdevice)(turn - turns);

		if (!closed && (work != TURN_KERNELS || stream_capturing_any() || !bound_of(turn)))
			break;
		if (!closed && burst_holds(ordinal)) {
			gate_leave();
			burst_wait(ordinal);
			gate_enter();
			waited = true;
			continue;
		}
		if (!closed && fell_back)
			break;
		device = closed ? NULL : device_current();
		if (!closed && (!device || &turns[device->ordinal] != turn || !is_ahead(turn, device, false)))
			break;
		/* What it launched last is to be heard of when it finishes, not milliseconds later. Inside: an event is
		 * work for the GPU. */
		if (!closed)
			counters_mark(stream, per_thread);
		gate_leave();
		while (closed && is_closed(turn))
			sleep_while(turn, CLOSED, 0);
		if (!closed)
			fall_back(turn, device);
		gate_enter();
		waited = true;
		fell_back |= !closed;
	}
	return waited;
}

void turn_enter_context(CUcontext context)
{
	bool pushed;

	gate_enter();
	if (!__atomic_load_n(&turn_any, __ATOMIC_RELAXED))
		return;
	ours_enter();
	pushed = context && context != driver_context() && !real.cuCtxPushCurrent_v2(context);
	ours_leave();
	turn_hold(TURN_OTHER, NULL, false);
	ours_enter();
	if (pushed)
		real.cuCtxPopCurrent_v2(&context);
	ours_leave();
}

/* Turns */

/* Whether nothing runs there. The driver is asked once all that is counted has finished: what waits in it cannot be had
 * back, and keeps a CPU busy. */
static bool runs_nothing(struct device *device, uint64_t timeout_us)
{
	/* A stream of this GPU may join a capture that has begun on another one, whose gate is open. */
	return !gate_capturing() && counters_drain(device) && quiet_wait(device, timeout_us);
}

int turn_end(struct device *device, uint64_t timeout_us, bool *drained)
{
	const uint64_t start = moment_us();
	const uint64_t bound = timeout_us < DRAIN_LEAST ? DRAIN_LEAST :
			       timeout_us > DRAIN_MOST ? DRAIN_MOST : timeout_us;
	const uint64_t until = start + bound;
	struct turn *turn = &turns[device->ordinal];
	const bool again = is_closed(turn);
	uint64_t now, pause = LOOK_LEAST;

	*drained = false;
	__atomic_store_n(&turn->device, device, __ATOMIC_RELEASE);
	__atomic_store_n(&turn->drained, false, __ATOMIC_RELAXED);
	if (!device->elastic || !device->quiet) {
		if (again)
			set(turn, OPEN, 0);
		return EOPNOTSUPP;
	}
	if (!again) {
		if (gate_capturing())
			return EBUSY;
		turn->seen = false;
		__atomic_store_n(&turn->closed_at, start, __ATOMIC_RELAXED);
		set(turn, CLOSED, 0);
	}
	if (!turn->seen) {
		turn->seen = gate_pass(until - start);
		/* A thread that was inside may have begun to capture; none does here that has seen it. */
		if (gate_capturing()) {
			set(turn, OPEN, 0);
			return EBUSY;
		}
	}
	for (now = moment_us(); turn->seen; now = moment_us()) {
		*drained = runs_nothing(device, now < until ? until - now : 0);
		now = moment_us();
		if (*drained || now >= until)
			break;
		pause_for(now + pause < until ? pause : until - now);
		pause = pause * 2 < LOOK_MOST ? pause * 2 : LOOK_MOST;
	}
	__atomic_store_n(&turn->drained, *drained, __ATOMIC_RELAXED);
	if (*drained)
		counters_all_finished(device);
	if (!again || *drained)
		log_line("device %d: the turn is over, %s after %llu us, %u threads wait", device->ordinal,
			 *drained ? "nothing runs" : "something runs", (unsigned long long)(moment_us() - start),
			 turn_waiting(device));
	return 0;
}

bool turn_is_late(const struct device *device)
{
	const struct turn *turn = &turns[device->ordinal];

	return is_closed(turn) && !__atomic_load_n(&turn->drained, __ATOMIC_RELAXED);
}

/* What is learnt of how fast kernels finish begins now. */
static void begin_pace(struct device *device, struct pace *pace)
{
	uint64_t submitted;

	pthread_mutex_lock(&lock);
	totals_get(device, &submitted, &pace->finished);
	pace->since = moment_us();
	pace->vain = 0;
	pthread_mutex_unlock(&lock);
}

void turn_begin(struct device *device, uint64_t run_ahead_us)
{
	struct turn *turn = &turns[device->ordinal];

	log_line("device %d: a turn begins, run-ahead %llu us, %u threads waited", device->ordinal,
		 (unsigned long long)run_ahead_us, turn_waiting(device));
	begin_pace(device, &turn->pace);
	__atomic_store_n(&turn->device, device, __ATOMIC_RELEASE);
	__atomic_store_n(&device->mark_every, run_ahead_us ? 1 : 0, __ATOMIC_RELAXED);
	set(turn, OPEN, run_ahead_us < RUN_AHEAD_MOST ? run_ahead_us : RUN_AHEAD_MOST);
}

/* Where nothing is bounded any more, no launch waits for a part of what is pending. */
static void mark_less(const struct turn *turn, struct device *device)
{
	if (!bound_of(turn))
		__atomic_store_n(&device->mark_every, 0, __ATOMIC_RELAXED);
}

void turn_bound(struct device *device, uint64_t run_ahead_us)
{
	struct turn *turn = &turns[device->ordinal];

	if (run_ahead_us && !bound_of(turn))
		begin_pace(device, &turn->pace);
	__atomic_store_n(&turn->bound_us, run_ahead_us, __ATOMIC_SEQ_CST);
	count_any();
	mark_less(turn, device);
}

static void open_one(struct turn *turn)
{
	struct device *device = __atomic_load_n(&turn->device, __ATOMIC_ACQUIRE);

	if (is_closed(turn) || __atomic_load_n(&turn->run_ahead_us, __ATOMIC_RELAXED))
		set(turn, OPEN, 0);
	if (device)
		mark_less(turn, device);
}

/* Whether what was launched there before the end of its turn may run still, and is looked at. */
static bool is_watched(const struct turn *turn)
{
	const struct device *device = __atomic_load_n(&turn->device, __ATOMIC_ACQUIRE);
	uint64_t submitted, finished;

	if (!device || !is_closed(turn) ||
	    moment_us() - __atomic_load_n(&turn->closed_at, __ATOMIC_RELAXED) >= DRAIN_WATCHED)
		return false;
	totals_get(device, &submitted, &finished);
	return submitted > finished;
}

bool turn_watch(void)
{
	bool any = false;

	for (size_t i = 0; i < GG_ORDINALS; i++) {
		if (!is_watched(&turns[i]))
			continue;
		for (unsigned int looks = 0; looks < LOOKS_DRAIN && is_watched(&turns[i]); looks++) {
			pause_for(LOOK_DRAIN);
			counters_drain(__atomic_load_n(&turns[i].device, __ATOMIC_ACQUIRE));
		}
		any = true;
	}
	return any;
}

void turn_open(struct device *device)
{
	open_one(&turns[device->ordinal]);
}

void turn_open_all(void)
{
	for (size_t i = 0; i < GG_ORDINALS; i++)
		open_one(&turns[i]);
}

void turn_yield(struct device *device, uint64_t run_ahead_us)
{
	struct turn *turn = &turns[device->ordinal];

	if (__atomic_load_n(&turn->yield_us, __ATOMIC_RELAXED) == run_ahead_us)
		return;
	__atomic_store_n(&turn->yield_us, run_ahead_us < RUN_AHEAD_MOST ? run_ahead_us : RUN_AHEAD_MOST,
			 __ATOMIC_SEQ_CST);
	set(turn, turn->word, turn->run_ahead_us);
	mark_less(turn, device);
}

unsigned int turn_waiting(const struct device *device)
{
	return __atomic_load_n(&turns[device->ordinal].waiting, __ATOMIC_RELAXED) + burst_waiting(device->ordinal);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	for (size_t i = 0; i < GG_ORDINALS; i++)
		turns[i] = (struct turn){ .word = OPEN };
	turn_any = 0;
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
