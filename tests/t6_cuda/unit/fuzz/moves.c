// SPDX-License-Identifier: Apache-2.0
#include "moves.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "double.h"
#include "keeper.h"
#include "model.h"
#include "turn.h"

/* Most bytes that move at once, in chunks of the smallest size. */
#define MOST 40
/* Time for which a driver call waits for a move within it, in ns. */
#define WITHIN_NS 5000000

/* Moves between two grants of the host. */
#define GRANTED 4

/* Time for a turn to end, and most time for which its memory is away after that, us. */
#define DRAIN_US 20000
#define AWAY_US 3000

/* Kinds of moves; a gap between two turns has several. */
enum kind { EXCHANGE, LIMIT, IN, OUT, GAP, KINDS };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct device *device;
static bool ordered, forbidden;
static enum kind kind;
static uint64_t bytes;
static unsigned int orders;	/* of the thread alone */
static unsigned int bare;	/* atomically */

static void carry_out(enum kind what, uint64_t amount);

/* The program waits for its turn, if nothing of it keeps running; meanwhile some of its memory goes, and comes back. */
static void wait_for_turn(uint64_t amount)
{
	bool drained = false;

	if (turn_end(device, DRAIN_US, &drained))
		return;
	if (drained) {
		double_out(device, amount);
		usleep((useconds_t)model_odd(AWAY_US));
		if (model_odd(3))
			carry_out(model_odd(2) ? IN : EXCHANGE, (1 + model_odd(MOST)) * GG_CHUNK);
		__atomic_add_fetch(&bare, __atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST), __ATOMIC_RELAXED);
	}
	turn_begin(device, 0);
}

unsigned int moves_bare(void)
{
	return __atomic_load_n(&bare, __ATOMIC_RELAXED);
}

static void carry_out(enum kind what, uint64_t amount)
{
	switch (what) {
	case EXCHANGE:
		double_exchange(device, amount);
		break;
	case LIMIT:
		double_limit(amount);
		break;
	case IN:
		double_in(device, amount);
		break;
	case GAP:
		wait_for_turn(amount);
		break;
	default:
		double_out(device, amount);
	}
}

static void *move(void *unused)
{
	pthread_mutex_lock(&lock);
	for (;;) {
		while (!ordered)
			pthread_cond_wait(&changed, &lock);
		const enum kind what = kind;
		const uint64_t amount = bytes;

		pthread_mutex_unlock(&lock);
		/* Meanwhile the host's grant changes, or is taken away. */
		if (++orders % GRANTED == 0)
			keeper_grant(device, orders % (3 * GRANTED) ? amount : UINT64_MAX);
		carry_out(what, amount);
		pthread_mutex_lock(&lock);
		ordered = false;
		pthread_cond_broadcast(&changed);
	}
	return unused;
}

void moves_start(struct device *of)
{
	pthread_t thread;

	device = of;
	CHECK(!pthread_create(&thread, NULL, move, NULL));
}

/* Orders one move at a time. With `lock` held. */
static void order(uint64_t (*random)(uint64_t))
{
	static const enum kind kinds[] = { EXCHANGE, LIMIT, IN, OUT, OUT, GAP };

	if (ordered || forbidden)
		return;
	kind = kinds[random(sizeof(kinds) / sizeof(kinds[0]))];
	bytes = random(3) ? (1 + random(MOST)) * GG_CHUNK : UINT64_MAX;
	ordered = true;
	pthread_cond_broadcast(&changed);
}

void moves_rest(void)
{
	pthread_mutex_lock(&lock);
	while (ordered)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
}

void moves_allow(bool allowed)
{
	pthread_mutex_lock(&lock);
	forbidden = !allowed;
	pthread_mutex_unlock(&lock);
	if (!allowed)
		moves_rest();
}

void moves_now(void)
{
	moves_rest();
	moves_along();
	moves_rest();
}

void moves_along(void)
{
	pthread_mutex_lock(&lock);
	order(model_any);
	pthread_mutex_unlock(&lock);
}

void moves_within(void)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += WITHIN_NS;
	until.tv_sec += until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	pthread_mutex_lock(&lock);
	order(model_odd);
	while (ordered && pthread_cond_timedwait(&changed, &lock, &until) != ETIMEDOUT)
		;
	pthread_mutex_unlock(&lock);
}
