// SPDX-License-Identifier: Apache-2.0
/*
 * The gate is an asymmetric Dekker lock. A thread publishes `inside` in a slot of its own, then reads `closed`; the
 * closer publishes `closed`, then reads every slot. With both stores visible before the reads, at least one side sees
 * the other. The closer orders all threads by membarrier(2), so that entering needs no fence. Where the kernel has no
 * membarrier, or a sandbox forbids it, entering has one.
 */

#include "gate.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "life.h"
#include "moment.h"

/* Nanoseconds between two looks whether the noted threads have left the gate: at first, and at most. */
#define PAUSE_LEAST_NS 10000
#define PAUSE_MOST_NS 500000
/* Milliseconds between two calls of `patient`, which says whether to go on waiting for threads inside. */
#define LOOK_MS 5

struct slot {
	bool inside;		/* atomically */
	bool waits;		/* atomically: in a call that waits for work */
	bool begs;		/* under `lock`: inside, and waits for the closing thread */
	bool taken;		/* under `lock`: belongs to a thread */
	unsigned int depth;	/* for that thread alone */
	uint64_t entered;	/* atomically; written by that thread: times that it came inside */
	uint64_t noted;		/* under `lock`: `entered` when the thread was noted by gate_pass; 0: not noted */
	struct slot *next;
} __attribute__((aligned(64)));

static bool closed;		/* atomically; written under `lock` */
static bool standing;		/* atomically; written under `lock`: no thread may wait for work either */
/* Whether entering must fence; set before the first slot is given out. */
static bool fenced = true;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;	/* a thread left a closed gate; it opened; a capture ended; waits may go on */
static struct slot *slots;	/* under `lock`; never freed, but used again */
static int captures;		/* under `lock` */
static bool closing;		/* under `lock`: from gate_close to gate_open, by one thread */
static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread struct slot *mine;

static void word_is_out(bool *flag)
{
	/* ThreadSanitizer does not understand fences; an exchange is one, on the machines that CUDA runs on. */
	if (fenced)
		(void)__atomic_exchange_n(flag, __atomic_load_n(flag, __ATOMIC_RELAXED),
					  __ATOMIC_SEQ_CST);
	else
		__atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static void all_words_are_out(void)
{
	if (fenced)
		return; /* `closed` is written, and `inside` read, with sequential consistency */
	syscall(__NR_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
}

static void register_barrier(void)
{
#ifdef __SANITIZE_THREAD__
	fenced = true;
#else
	fenced = syscall(__NR_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0;
#endif
}

/* The thread ended, perhaps by cancellation inside the gate. */
static void thread_ended(void *argument)
{
	struct slot *slot = argument;

	pthread_mutex_lock(&lock);
	__atomic_store_n(&slot->inside, false, __ATOMIC_RELEASE);
	__atomic_store_n(&slot->waits, false, __ATOMIC_RELEASE);
	slot->begs = false;
	slot->depth = 0;
	slot->taken = false;
	mine = NULL;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

static void prepare(void)
{
	moment_condition(&changed);
	pthread_key_create(&key, thread_ended);
	register_barrier();
}

/* Give a thread its slot, as it comes inside for the first time. */
static struct slot *join(void)
{
	struct slot *slot;

	pthread_once(&once, prepare);
	pthread_mutex_lock(&lock);
	for (slot = slots; slot && slot->taken; slot = slot->next)
		;
	if (!slot) {
		slot = aligned_alloc(_Alignof(struct slot), sizeof(*slot));
		if (!slot)
			abort(); /* 64 bytes; and this thread cannot be kept out otherwise */
		*slot = (struct slot){ .next = slots };
		slots = slot;
	}
	slot->taken = true;
	pthread_mutex_unlock(&lock);
	pthread_setspecific(key, slot);
	mine = slot;
	return slot;
}

static void tell(void)
{
	pthread_mutex_lock(&lock);
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

static void unlock(void *unused)
{
	(void)unused;
	pthread_mutex_unlock(&lock);
}

/* Wait until `barred` is false. A thread may be cancelled here: its slot is cleared as it ends, which takes the
 * lock. */
static __attribute__((noinline)) void stay_outside(const bool *barred)
{
	pthread_mutex_lock(&lock);
	pthread_cleanup_push(unlock, NULL);
	pthread_cond_broadcast(&changed);
	while (__atomic_load_n(barred, __ATOMIC_RELAXED))
		pthread_cond_wait(&changed, &lock);
	pthread_cleanup_pop(1);
}

/* Set `word`, in this thread's slot, and return once `barred` is false; the word is cleared while waiting for that. */
static inline void enter(bool *word, const bool *barred)
{
	for (;;) {
		__atomic_store_n(word, true, __ATOMIC_RELEASE);
		word_is_out(word);
		if (__builtin_expect(!__atomic_load_n(barred, __ATOMIC_SEQ_CST), 1))
			return;
		__atomic_store_n(word, false, __ATOMIC_RELEASE);
		stay_outside(barred);
	}
}

static inline void leave(bool *word, const bool *barred)
{
	__atomic_store_n(word, false, __ATOMIC_RELEASE);
	word_is_out(word);
	if (__builtin_expect(__atomic_load_n(barred, __ATOMIC_SEQ_CST), 0))
		tell();
}

void gate_enter(void)
{
	struct slot *slot = mine ? mine : join();

	if (slot->depth++)
		return;
	__atomic_store_n(&slot->entered, slot->entered + 1, __ATOMIC_RELAXED);
	enter(&slot->inside, &closed);
}

void gate_leave(void)
{
	struct slot *slot = mine;

	if (slot && !--slot->depth)
		leave(&slot->inside, &closed);
}

bool gate_nested(void)
{
	return mine && mine->depth > 1;
}

void gate_wait_enter(void)
{
	struct slot *slot = mine ? mine : join();

	enter(&slot->waits, &standing);
}

void gate_wait_leave(void)
{
	if (mine)
		leave(&mine->waits, &standing);
}

/* Return whether no thread but the caller, which does not wait for itself, is inside. */
static bool empty(void)
{
	for (struct slot *slot = slots; slot; slot = slot->next)
		if (slot != mine && __atomic_load_n(&slot->inside, __ATOMIC_SEQ_CST))
			return false;
	return true;
}

/* Count the threads inside, except the caller. With `lock` held. */
static unsigned int count_inside(void)
{
	unsigned int inside = 0;

	for (struct slot *slot = slots; slot; slot = slot->next)
		inside += slot != mine && __atomic_load_n(&slot->inside, __ATOMIC_SEQ_CST);
	return inside;
}

static bool any_begs(void)
{
	for (struct slot *slot = slots; slot; slot = slot->next)
		if (slot != mine && slot->begs)
			return true;
	return false;
}

static bool nobody_waits(void)
{
	for (struct slot *slot = slots; slot; slot = slot->next)
		if (slot != mine && __atomic_load_n(&slot->waits, __ATOMIC_SEQ_CST))
			return false;
	return true;
}

static void set(bool *barred, bool value)
{
	__atomic_store_n(barred, value, __ATOMIC_SEQ_CST);
	if (value)
		all_words_are_out();
	else
		pthread_cond_broadcast(&changed);
}

static void set_closed(bool value)
{
	set(&closed, value);
}

static struct timespec in_ms(unsigned int ms)
{
	struct timespec then;

	clock_gettime(CLOCK_MONOTONIC, &then);
	then.tv_sec += ms / 1000;
	then.tv_nsec += (long)(ms % 1000) * 1000000;
	if (then.tv_nsec >= 1000000000) {
		then.tv_nsec -= 1000000000;
		then.tv_sec++;
	}
	return then;
}

/* Return false once the time is up. With `lock` held. */
static bool wait_until(const struct timespec *deadline)
{
	return pthread_cond_timedwait(&changed, &lock, deadline) != ETIMEDOUT;
}

static void beg(bool value)
{
	if (!mine || !mine->depth)
		return;
	pthread_mutex_lock(&lock);
	mine->begs = value;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

void gate_beg(void)
{
	beg(true);
}

void gate_beg_no_more(void)
{
	beg(false);
}

/* Wait until the gate is empty. False: the time is up, or a thread inside waits for this one. With `lock` held. */
static bool wait_empty(const struct timespec *deadline, bool (*patient)(unsigned int, void *), void *argument)
{
	struct timespec until = *deadline;
	bool time_left = true;

	/* A newcomer sets `inside` before it sees the gate closed, and clears it then. So one look that finds the gate
	 * empty is enough. */
	while (time_left && !empty()) {
		unsigned int inside;

		if (any_begs())
			return false;
		if (wait_until(&until))
			continue;
		inside = count_inside();
		pthread_mutex_unlock(&lock);
		time_left = patient && patient(inside, argument);
		pthread_mutex_lock(&lock);
		until = in_ms(LOOK_MS);
	}
	return time_left;
}

bool gate_close(unsigned int timeout_ms)
{
	return gate_close_patiently(timeout_ms, NULL, NULL);
}

bool gate_close_patiently(unsigned int timeout_ms, bool (*patient)(unsigned int inside, void *argument), void *argument)
{
	const struct timespec deadline = in_ms(timeout_ms);
	bool time_left = true, done = false;

	pthread_once(&once, prepare);
	pthread_mutex_lock(&lock);
	while (closing && time_left)
		time_left = wait_until(&deadline);
	if (closing) {
		pthread_mutex_unlock(&lock);
		return false;
	}
	closing = true;
	while (time_left && !done) {
		/* While a stream is captured the program must get on, so that the capture can end. */
		while (captures && time_left)
			time_left = wait_until(&deadline);
		if (captures)
			break;
		set_closed(true);
		time_left = wait_empty(&deadline, patient, argument);
		/* A thread that was still inside may have begun a capture; now none can. */
		done = empty() && !captures;
		if (!done)
			set_closed(false);
	}
	if (!done) {
		closing = false;
		pthread_cond_broadcast(&changed);
	}
	pthread_mutex_unlock(&lock);
	return done;
}

void gate_open(void)
{
	pthread_mutex_lock(&lock);
	closing = false;
	set_closed(false);
	pthread_mutex_unlock(&lock);
}

/* Return whether some thread has been inside ever since it was noted. With `lock` held. */
static bool any_noted(void)
{
	for (struct slot *slot = slots; slot; slot = slot->next)
		if (slot->noted && __atomic_load_n(&slot->inside, __ATOMIC_SEQ_CST) &&
		    __atomic_load_n(&slot->entered, __ATOMIC_RELAXED) == slot->noted)
			return true;
	return false;
}

bool gate_pass(uint64_t timeout_us)
{
	const uint64_t until = moment_us() + timeout_us;
	struct timespec pause = { .tv_nsec = PAUSE_LEAST_NS };
	bool any;

	pthread_once(&once, prepare);
	pthread_mutex_lock(&lock);
	all_words_are_out();
	for (struct slot *slot = slots; slot; slot = slot->next) {
		bool inside = slot != mine && __atomic_load_n(&slot->inside, __ATOMIC_SEQ_CST);

		slot->noted = inside ? __atomic_load_n(&slot->entered, __ATOMIC_RELAXED) : 0;
	}
	/* A thread that leaves an open gate does not notify. */
	while ((any = any_noted()) && moment_us() < until) {
		pthread_mutex_unlock(&lock);
		nanosleep(&pause, NULL);
		if (pause.tv_nsec < PAUSE_MOST_NS)
			pause.tv_nsec *= 2;
		pthread_mutex_lock(&lock);
	}
	pthread_mutex_unlock(&lock);
	return !any;
}

bool gate_stand(unsigned int timeout_ms)
{
	const struct timespec deadline = in_ms(timeout_ms);
	bool time_left = true, done;

	pthread_mutex_lock(&lock);
	set(&standing, true);
	while (!nobody_waits() && time_left)
		time_left = wait_until(&deadline);
	done = nobody_waits();
	if (!done)
		set(&standing, false);
	pthread_mutex_unlock(&lock);
	return done;
}

void gate_go_on(void)
{
	pthread_mutex_lock(&lock);
	set(&standing, false);
	pthread_mutex_unlock(&lock);
}

void gate_capture(int change)
{
	pthread_once(&once, prepare);
	pthread_mutex_lock(&lock);
	captures += change;
	if (captures < 0)
		captures = 0;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

bool gate_capturing(void)
{
	bool any;

	pthread_mutex_lock(&lock);
	any = captures > 0;
	pthread_mutex_unlock(&lock);
	return any;
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	moment_condition(&changed);
	for (struct slot *slot = slots; slot; slot = slot->next) {
		slot->inside = slot->waits = slot->begs = false;
		slot->depth = 0;
		slot->taken = slot == mine;
	}
	closed = standing = false;
	closing = false;
	captures = 0;
	/* By the letter of membarrier(2), the registration was of the parent's memory. */
	register_barrier();
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
