// SPDX-License-Identifier: Apache-2.0
/*
 * A thread that waits has no lock and is not inside the gate: it sleeps in futex(2) on the word of its GPU. So memory
 * moves meanwhile; a handler of a signal may fork there; and nothing is left behind by a thread that ends.
 *
 * Run-ahead is what is pending, by the counters, times what a kernel took lately. A kernel may wait for another one that
 * its program has yet to launch: so a wait ends after the bound without anything that finishes, and the next such wait
 * is half as long.
 */

#include "turn.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

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
/* Bounds for which one launch waits, while others finish. */
#define BOUNDS_MOST 16
/* Waits in vain that are counted: the next is of no length. */
#define VAIN_MOST 63

enum { OPEN, CLOSED };

/* What is known of how fast kernels finish on a GPU, while its run-ahead is bounded. */
struct pace {
	uint64_t finished, since;	/* so many have, by that moment, or did when the GPU was last idle; us */
	uint64_t kernel_ns;		/* that one took lately; 0: not known */
	unsigned int vain;		/* waits, since then, in which none finished */
};

static struct turn {
	uint32_t word;		/* atomically: OPEN, CLOSED; threads sleep on it */
	uint64_t run_ahead_us;	/* atomically; 0: not bounded */
	unsigned int waiting;	/* atomically */
	bool seen;		/* of the listening thread: each thread inside has seen that it is closed */
	struct pace pace;	/* under `lock` */
} turns[GG_ORDINALS];

unsigned int turn_any;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_closed(const struct turn *turn)
{
	return __atomic_load_n(&turn->word, __ATOMIC_ACQUIRE) == CLOSED;
}

/* Sleeps while the word is `word`, at most so long; 0: for ever. Spurious returns are harmless. */
static void sleep_while(struct turn *turn, uint32_t word, uint64_t us)
{
	const struct timespec time = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };

	syscall(SYS_futex, &turn->word, FUTEX_WAIT_PRIVATE, word, us ? &time : NULL, NULL, 0);
}

static void set(struct turn *turn, uint32_t word, uint64_t run_ahead_us)
{
	unsigned int any = 0;

	__atomic_store_n(&turn->run_ahead_us, run_ahead_us, __ATOMIC_SEQ_CST);
	__atomic_store_n(&turn->word, word, __ATOMIC_SEQ_CST);
	for (size_t i = 0; i < GG_ORDINALS; i++)
		any += is_closed(&turns[i]) || __atomic_load_n(&turns[i].run_ahead_us, __ATOMIC_RELAXED);
	__atomic_store_n(&turn_any, any, __ATOMIC_SEQ_CST);
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

/* Whether what is pending would take longer than the bound, by what is known now. */
static bool is_ahead(struct turn *turn, struct device *device)
{
	const uint64_t bound_us = __atomic_load_n(&turn->run_ahead_us, __ATOMIC_RELAXED);
	struct pace *pace = &turn->pace;
	uint64_t submitted, finished, pending, now;
	bool ahead;

	totals_get(device, &submitted, &finished);
	pthread_mutex_lock(&lock);
	now = moment_us();
	pending = submitted > finished ? submitted - finished : 0;
	if (finished > pace->finished) {
		const uint64_t took_ns = (now - pace->since) * 1000 / (finished - pace->finished);

		pace->kernel_ns = pace->kernel_ns ? (pace->kernel_ns + took_ns) / 2 : took_ns;
		pace->kernel_ns += !pace->kernel_ns;
		pace->finished = finished;
		pace->since = now;
		pace->vain = 0;
	}
	if (!pending)
		pace->since = now;	/* what comes next did not wait for anything */
	ahead = bound_us && pending && (!pace->kernel_ns || pending * pace->kernel_ns > bound_us * 1000);
	pthread_mutex_unlock(&lock);
	return ahead;
}

static void look(struct device *device)
{
	const CUstreamCaptureMode mode = driver_enter();

	counters_progress(device);
	driver_leave(mode);
}

/* Waits, outside, until it is no more so far ahead. */
static void fall_back(struct turn *turn, struct device *device, CUstream stream, bool per_thread)
{
	const uint64_t bound_us = __atomic_load_n(&turn->run_ahead_us, __ATOMIC_RELAXED);
	const uint64_t pause = bound_us / 16 < LOOK_LEAST ? LOOK_LEAST : bound_us / 16 > LOOK_MOST ? LOOK_MOST : bound_us / 16;
	const uint64_t last = moment_us() + bound_us * BOUNDS_MOST;
	uint64_t until, finished, patience, now;
	struct pace *pace = &turn->pace;

	/* What it launched last is to be heard of when it finishes, not milliseconds later. */
	counters_mark(stream, per_thread);
	pthread_mutex_lock(&lock);
	patience = bound_us >> pace->vain;
	finished = pace->finished;
	pthread_mutex_unlock(&lock);
	until = moment_us() + patience;
	for (now = 0; patience >= pause && now < until && now < last && !is_closed(turn); now = moment_us()) {
		sleep_while(turn, OPEN, pause);
		look(device);
		if (!is_ahead(turn, device))
			return;
		pthread_mutex_lock(&lock);
		if (pace->finished != finished)
			until = moment_us() + bound_us;
		finished = pace->finished;
		pthread_mutex_unlock(&lock);
	}
	pthread_mutex_lock(&lock);
	pace->vain += pace->vain < VAIN_MOST;
	pthread_mutex_unlock(&lock);
}

/* Holding */

/* Whether work for the stream is captured: it runs later, and its capture must come to an end. */
static bool is_captured(CUstream stream, bool per_thread)
{
	return !stream_runs(stream, per_thread);
}

bool turn_hold(enum turn_work work, CUstream stream, bool per_thread)
{
	struct turn *turn = gate_nested() ? NULL : of_stream(stream, per_thread);
	bool waited = false, fell_back = false;
	struct device *device;

	while (turn && !is_captured(stream, per_thread)) {
		const bool closed = is_closed(turn);

		if (!closed && (fell_back || work != TURN_KERNELS || stream_capturing_any() ||
				!__atomic_load_n(&turn->run_ahead_us, __ATOMIC_RELAXED)))
			break;
		device = closed ? NULL : device_current();
		if (!closed && (!device || &turns[device->ordinal] != turn || !is_ahead(turn, device)))
			break;
		gate_leave();
		__atomic_add_fetch(&turn->waiting, 1, __ATOMIC_RELAXED);
		while (closed && is_closed(turn))
			sleep_while(turn, CLOSED, 0);
		if (!closed)
			fall_back(turn, device, stream, per_thread);
		__atomic_sub_fetch(&turn->waiting, 1, __ATOMIC_RELAXED);
		gate_enter();
		waited = true;
		fell_back |= !closed;
	}
	return waited;
}

/* Turns */

int turn_end(struct device *device, uint64_t timeout_us, bool *drained)
{
	const uint64_t start = moment_us();
	const uint64_t until = start + (timeout_us < DRAIN_LEAST ? DRAIN_LEAST : timeout_us > DRAIN_MOST ? DRAIN_MOST : timeout_us);
	struct turn *turn = &turns[device->ordinal];
	const bool again = is_closed(turn);
	uint64_t now;

	*drained = false;
	if (!again) {
		if (gate_capturing())
			return EBUSY;
		turn->seen = false;
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
	now = moment_us();
	/* A stream of this GPU may join a capture that has begun on another one, whose gate is open. */
	*drained = turn->seen && !gate_capturing() && device->elastic && device->quiet &&
		   quiet_wait(device, now < until ? until - now : 0);
	if (*drained)
		counters_all_finished(device);
	if (!again || *drained)
		log_line("device %d: the turn is over, %s after %llu us, %u threads wait", device->ordinal,
			 *drained ? "nothing runs" : "something runs", (unsigned long long)(moment_us() - start),
			 turn_waiting(device));
	return 0;
}

void turn_begin(struct device *device, uint64_t run_ahead_us)
{
	struct turn *turn = &turns[device->ordinal];
	struct pace *pace = &turn->pace;
	uint64_t submitted;

	log_line("device %d: a turn begins, run-ahead %llu us, %u threads waited", device->ordinal,
		 (unsigned long long)run_ahead_us, turn_waiting(device));
	pthread_mutex_lock(&lock);
	totals_get(device, &submitted, &pace->finished);
	pace->since = moment_us();
	pace->vain = 0;
	pthread_mutex_unlock(&lock);
	set(turn, OPEN, run_ahead_us < RUN_AHEAD_MOST ? run_ahead_us : RUN_AHEAD_MOST);
}

void turn_open_all(void)
{
	for (size_t i = 0; i < GG_ORDINALS; i++)
		if (is_closed(&turns[i]) || __atomic_load_n(&turns[i].run_ahead_us, __ATOMIC_RELAXED))
			set(&turns[i], OPEN, 0);
}

unsigned int turn_waiting(const struct device *device)
{
	return __atomic_load_n(&turns[device->ordinal].waiting, __ATOMIC_RELAXED);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	for (size_t i = 0; i < GG_ORDINALS; i++)
		turns[i] = (struct turn){ .word = OPEN };
	turn_any = 0;
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
