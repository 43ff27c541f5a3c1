// SPDX-License-Identifier: Apache-2.0
/*
 * A waiting thread holds no lock and is outside the gate: it sleeps in futex(2) on the word of its GPU. So memory can
 * move meanwhile, a signal handler may fork there, and a thread that ends leaves nothing behind.
 *
 * Run-ahead is the number of pending kernels, by the counters, times the recent time of a kernel (pace.h). A kernel may
 * wait for another that its program has yet to launch. So a wait ends once nothing has finished for the bound, or for
 * twice the longest recent gap if that is more; the next such wait, of whichever thread, is half as long.
 *
 * What goes out in a gap between two turns may be mapped nowhere: it is covered before the gate opens. Whatever passes
 * while there is some, on another GPU or nested, covers it first, and from then on, in that gap, nothing more is bare.
 *
 * `lock` is taken with no other lock held; under it only that of totals.c is taken.
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
#include "hold.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "ours.h"
#include "pace.h"
#include "quiet.h"
#include "stream.h"
#include "totals.h"

/* All in microseconds, except where a comment says otherwise. */
#define DRAIN_MOST 1000000	/* longest wait of the listening thread, which does nothing else then */
#define DRAIN_LEAST 2000	/* shortest time to learn whether something runs: another thread asks the driver */
#define RUN_AHEAD_MOST 10000000
#define RUN_AHEAD_SHORT 2000	/* a bound below this is watched by a punctual thread */
#define LOOK_LEAST 50		/* interval between two looks at what has finished */
#define LOOK_MOST 1000
#define PATIENCE_MOST 250000	/* longest wait of a launch with nothing finishing, if the bound is less */
/* Longest wait of one launch while others finish, in bounds; twice its patience, if that is longer. */
#define BOUNDS_MOST 16
/* Most waits in vain that are counted. */
#define VAIN_MOST 63
/* Time for which work is watched after the end of a turn, at intervals of LOOK_DRAIN. */
#define DRAIN_WATCHED 50000
#define LOOK_DRAIN 100
#define LOOKS_DRAIN 10		/* looks before the listening thread attends to the daemon again */

enum { OPEN, CLOSED };

static struct turn {
	uint32_t word;		/* atomically: OPEN or CLOSED; threads sleep on it */
	uint64_t run_ahead_us;	/* atomically; bound of a turn; 0: none */
	uint64_t bound_us;	/* atomically; bound while memory waits to move; 0: none */
	uint64_t yield_us;	/* atomically; bound on what is left, running kernel included; grows (hold.h) */
	unsigned int waiting;	/* atomically */
	bool seen;		/* of the listening thread: every thread inside has seen that it is closed */
	bool drained;		/* atomically: everything had finished, and nothing has run since */
	uint64_t closed_at;	/* atomically: time of the last close; us */
	struct device *device;	/* atomically; NULL before its first turn */
	uint64_t gap;		/* atomically: number of turns that have ended */
	uint64_t covered;	/* atomically: the gap in which nothing more may be bare */
	struct pace pace;	/* under `lock` */
} turns[GG_ORDINALS];

unsigned int turn_any;
unsigned int turn_bare;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void cover_nothing(struct device *device)
{
	(void)device;
}

void (*turn_covers)(struct device *device) = cover_nothing;

static bool is_closed(const struct turn *turn)
{
	return __atomic_load_n(&turn->word, __ATOMIC_ACQUIRE) == CLOSED;
}

static uint64_t lower(uint64_t one, uint64_t other)
{
	return one && other ? one < other ? one : other : one + other;
}

/* The lower of the two bounds on all pending work, in microseconds; 0: there is none. */
static uint64_t bound_of_all(const struct turn *turn)
{
	return lower(__atomic_load_n(&turn->run_ahead_us, __ATOMIC_RELAXED),
		     __atomic_load_n(&turn->bound_us, __ATOMIC_RELAXED));
}

/* The most that the program may be ahead, in microseconds; 0: as far as the driver lets it. */
static uint64_t bound_of(const struct turn *turn)
{
	return lower(bound_of_all(turn), __atomic_load_n(&turn->yield_us, __ATOMIC_RELAXED));
}

/* Sleeps while the word is `word`, for at most `us` microseconds; 0: for ever. Spurious returns are harmless. */
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

/* Two threads may call this at once, one for a turn and one for memory that moves. */
static void count_any(void)
{
	unsigned int any = __atomic_load_n(&turn_bare, __ATOMIC_RELAXED);

	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < GG_ORDINALS; i++)
		any += is_closed(&turns[i]) || bound_of(&turns[i]);
	__atomic_store_n(&turn_any, any, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&lock);
}

/* Nothing more is bare in the current gap, and what is, is covered. */
static void cover(struct turn *turn)
{
	struct device *device = __atomic_load_n(&turn->device, __ATOMIC_ACQUIRE);

	__atomic_store_n(&turn->covered, __atomic_load_n(&turn->gap, __ATOMIC_RELAXED), __ATOMIC_SEQ_CST);
	if (device && __atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST))
		turn_covers(device);
}

static void set(struct turn *turn, uint32_t word, uint64_t run_ahead_us)
{
	if (word == OPEN && is_closed(turn))
		cover(turn);
	__atomic_store_n(&turn->run_ahead_us, run_ahead_us, __ATOMIC_SEQ_CST);
	__atomic_store_n(&turn->word, word, __ATOMIC_SEQ_CST);
	count_any();
	syscall(SYS_futex, &turn->word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* The turns of the GPU of `stream`; NULL: unknown. A copy may go to a stream of a context that is not current. */
static struct turn *of_stream(CUstream stream, bool per_thread)
{
	const CUdevice ordinal = stream_device(stream, per_thread);

	return ordinal >= 0 ? &turns[ordinal] : NULL;
}

/* Run-ahead */

/* Whether the pending work would take longer than a bound, as far as is known now. `more_us`: microseconds until it no
 * longer would; 0: unknown. */
static bool is_ahead(struct turn *turn, struct device *device, bool watched, uint64_t *more_us)
{
	const uint64_t bound_us = bound_of_all(turn);
	const uint64_t held_until = burst_held_until((CUdevice)(turn - turns));
	uint64_t yield_us = __atomic_load_n(&turn->yield_us, __ATOMIC_RELAXED);
	struct pace *pace = &turn->pace;
	uint64_t submitted, finished, pending, now;
	bool ahead;

	totals_get(device, &submitted, &finished);
	pthread_mutex_lock(&lock);
	now = moment_us();
	pending = submitted > finished ? submitted - finished : 0;
	if (finished > pace->finished)
		pace_learn(pace, finished, pending, watched, held_until > pace->since, now);
	if (!pending)
		pace->since = now;	/* the next kernel did not wait for any other */
	if (yield_us)
		yield_us = hold_ahead_us(yield_us, held_until, now);
	__atomic_store_n(&device->mark_every, pace_mark_every(pace, lower(bound_us, yield_us)), __ATOMIC_RELAXED);
	ahead = pace_takes_longer(pace, pending, bound_us) || pace_has_more(pace, pending, yield_us, now);
	*more_us = pace_more_us(pace, pending, yield_us, now);
	pthread_mutex_unlock(&lock);
	return ahead;
}

/* Outside the gate, it asks the driver as a program does that waits for its work: not while the program stands by. */
static void look(struct device *device)
{
	CUstreamCaptureMode mode;

	gate_wait_enter();
	mode = driver_enter();
	counters_progress(device);
	driver_leave(mode);
	gate_wait_leave();
}

/* Returns how long nothing may finish before a launch is let go: the pending kernels may be waiting for it. */
static uint64_t patience_of(const struct pace *pace, uint64_t bound_us)
{
	uint64_t patience = pace->gap_us && pace->gap_us < PATIENCE_MOST / 2 ? 2 * pace->gap_us : PATIENCE_MOST;

	return patience > bound_us ? patience : bound_us;
}

/* Waits, outside the gate, until the program is no longer too far ahead. */
static void fall_back(struct turn *turn, struct device *device)
{
	const uint64_t bound_us = bound_of(turn), start = moment_us();
	const uint64_t pause = bound_us / 16 < LOOK_LEAST ? LOOK_LEAST :
			       bound_us / 16 > LOOK_MOST ? LOOK_MOST : bound_us / 16;
	struct pace *pace = &turn->pace;
	/* With so short a bound, late looks would leave the GPU without work. */
	const unsigned long slack_ns = bound_us < RUN_AHEAD_SHORT ? moment_punctual() : 0;
	uint64_t now, since, patience, last, finished, more_us = 0;
	unsigned int vain;

	pthread_mutex_lock(&lock);
	patience = patience_of(pace, bound_us);
	vain = pace->vain;
	finished = pace->finished;
	pthread_mutex_unlock(&lock);
	last = start + (bound_us * BOUNDS_MOST > patience * 2 ? bound_us * BOUNDS_MOST : patience * 2);
	/* The next launch goes as soon as it may, and not only at the next regular look. */
	for (since = start;; sleep_while(turn, OPEN, more_us && more_us < pause ? more_us : pause)) {
		bool in_vain;

		look(device);
		if (!is_ahead(turn, device, true, &more_us))
			break;
		now = moment_us();
		pthread_mutex_lock(&lock);
		if (pace->finished != finished) {
			finished = pace->finished;
			vain = pace->vain;
			since = now;
		}
		/* Wait for one pause at least: if a kernel takes far longer than those before, every launch let go is
		 * run-ahead. */
		in_vain = now - since >= (patience >> vain > pause ? patience >> vain : pause);
		/* Of the threads that wait at the same time, only one counts the wait in vain. */
		if (in_vain && pace->vain == vain)
			pace->vain += vain < VAIN_MOST;
		pthread_mutex_unlock(&lock);
		if (in_vain || now >= last || is_closed(turn))
			break;
	}
	moment_late_again(slack_ns);
}

/* Holding */

/* Whether work for the stream is being captured. It runs later, and the capture must be able to end. */
static bool is_captured(enum turn_work work, CUstream stream, bool per_thread)
{
	return work == TURN_JOINS ? stream_capturing_any() : !stream_runs(stream, per_thread);
}

/* The caller is inside: no memory moves, and a later gap begins only once it has left. */
void turn_cover_all(void)
{
	for (size_t i = 0; i < GG_ORDINALS; i++)
		__atomic_store_n(&turns[i].covered, __atomic_load_n(&turns[i].gap, __ATOMIC_RELAXED), __ATOMIC_SEQ_CST);
	turn_covers(NULL);
	count_any();
}

bool turn_hold(enum turn_work work, CUstream stream, bool per_thread)
{
	struct turn *turn = gate_nested() ? NULL : of_stream(stream, per_thread);
	bool waited = false, fell_back = false;
	struct device *device;
	uint64_t more_us;

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
		if (!closed && (!device || &turns[device->ordinal] != turn || !is_ahead(turn, device, false, &more_us)))
			break;
		/* Have the last launch noticed when it finishes, not milliseconds later. Inside the gate, since an
		 * event is work for the GPU. */
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
	if (__builtin_expect(__atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST) != 0, 0))
		turn_cover_all();
	return waited;
}

void turn_enter_context(CUcontext context)
{
	bool pushed;

	gate_enter();
	if (__atomic_load_n(&turn_any, __ATOMIC_RELAXED)) {
		ours_enter();
		pushed = context && context != driver_context() && !real.cuCtxPushCurrent_v2(context);
		ours_leave();
		turn_hold(TURN_OTHER, NULL, false);
		ours_enter();
		if (pushed)
			real.cuCtxPopCurrent_v2(&context);
		ours_leave();
	}
	if (detour_on())
		detour_home_context(context ? context : driver_context());
}

void turn_leave_context(CUcontext context)
{
	if (detour_on())
		detour_worked_context(context ? context : driver_context());
	gate_leave();
}

/* Turns */

/* Whether nothing runs on the GPU. The driver is asked only once everything that is counted has finished: a wait in the
 * driver cannot be cancelled, and keeps a CPU busy. */
static bool runs_nothing(struct device *device, uint64_t timeout_us)
{
	/* A stream of this GPU may join a capture that began on another GPU, whose gate is open. */
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
		__atomic_add_fetch(&turn->gap, 1, __ATOMIC_RELAXED);
		set(turn, CLOSED, 0);
	}
	if (!turn->seen) {
		turn->seen = gate_pass(until - start);
		/* A thread that was inside may have begun a capture; a thread that has seen the closed gate begins none
		 * here. */
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
		pause = pause * 2 < LOOK_DRAIN ? pause * 2 : LOOK_DRAIN;
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

bool turn_is_over(const struct device *device)
{
	return is_closed(&turns[device->ordinal]);
}

bool turn_is_one(const struct device *device)
{
	return turn_is_over(device) || __atomic_load_n(&turns[device->ordinal].run_ahead_us, __ATOMIC_RELAXED);
}

uint64_t turn_gap(const struct device *device)
{
	const struct turn *turn = &turns[device->ordinal];
	const bool in_one = is_closed(turn) && __atomic_load_n(&turn->drained, __ATOMIC_RELAXED);

	return in_one ? __atomic_load_n(&turn->gap, __ATOMIC_RELAXED) : 0;
}

bool turn_may_bare(const struct device *device)
{
	const uint64_t gap = turn_gap(device);

	return gap && gap != __atomic_load_n(&turns[device->ordinal].covered, __ATOMIC_SEQ_CST);
}

bool turn_is_late(const struct device *device)
{
	const struct turn *turn = &turns[device->ordinal];

	return is_closed(turn) && !__atomic_load_n(&turn->drained, __ATOMIC_RELAXED);
}

/* Starts to learn anew how fast kernels finish. */
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

/* Without a bound, no launch waits for a part of the pending work, so markers go by time alone. */
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

/* Whether work launched before the end of the turn may still be running, and is watched. */
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
	turn_any = turn_bare = 0;
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
