// SPDX-License-Identifier: Apache-2.0
#include "listener.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "burst.h"
#include "calm.h"
#include "command.h"
#include "contact.h"
#include "counters.h"
#include "daemon.h"
#include "departure.h"
#include "exchange.h"
#include "family.h"
#include "home.h"
#include "lent.h"
#include "life.h"
#include "log.h"
#include "mover.h"
#include "ours.h"
#include "piece.h"
#include "session.h"
#include "turn.h"
#include "workset.h"

/* Milliseconds of the longest sleep. */
#define LONGEST 2000
/* Milliseconds for the daemon to move the program, and to let it go on. */
#define DEPARTED 120000
/* Milliseconds until what was imported comes home, if no daemon says that it may. */
#define ALONE 5000

/* Bytes that come back in one go; then the daemon has a word. */
#define MOVE_BACK_PIECE (4096 * GG_MIB)

static int64_t sooner(int64_t one, int64_t other)
{
	return one < other ? one : other;
}

/* Memory comes back where there is room, or there may be; returns the ms until it is to be tried again. */
static int64_t move_back(void)
{
	bool due, any = false, more = false;
	int64_t next = LONGEST, home;

	pthread_mutex_lock(&session.lock);
	due = session_now_ms() >= session.next_move;
	for (int i = 0; i < session.managed_count; i++) {
		struct managed *managed = &session.managed[i];
		uint64_t want, owed, moved, usec;
		/* The daemon answers once what moved us has ended: until then the driver is busy with that. */
		const bool may_come = managed->ours || session_now_ms() - session.lost_at > ALONE;
		const bool told = managed->ours && session.features & FEATURE_SETS;
		/* What comes before its turn the daemon asks for: the room may be for another program, whose turn is
		 * sooner, in its own turn as well, and what comes by itself then has to wait until nothing runs. While
		 * there are turns the daemon says nothing of room. */
		const bool prepared = told && workset_is_prepared(managed->device);
		const bool waits = prepared || (told && turn_is_over(managed->device));

		pthread_mutex_unlock(&session.lock);
		next = sooner(next, workset_tick(managed->device, told));
		pthread_mutex_lock(&session.lock);
		/* Nothing moves there before its next turn, which would have to wait for this thread. */
		if (turn_is_late(managed->device))
			continue;
		pthread_mutex_unlock(&session.lock);
		home = may_come ? home_some(managed->device) : -1;
		if (home >= 0)
			next = sooner(next, home);
		owed = mover_owed(managed->device);
		calm_tick(managed->device);
		exchange_settle(managed->device);
		pthread_mutex_lock(&session.lock);
		/* Where there is room now there will be some then. */
		if (calm_rests(managed->device))
			managed->room = 0;
		want = at_most(managed->swapped + owed, MOVE_BACK_PIECE);
		if (want && ((due && !waits) || managed->room) && !calm_rests(managed->device)) {
			managed->room = 0;
			pthread_mutex_unlock(&session.lock);
			moved = mover_in(managed->device, want, &usec);
			if (moved < want)
				moved += piece_in(managed->device, want - moved, &usec);
			if (moved)
				log_line("gpu %d: moved %llu MiB back in %llu us", managed->device->index,
					  (unsigned long long)(moved / GG_MIB), (unsigned long long)usec);
			pthread_mutex_lock(&session.lock);
			session.moved_in_us += usec;
			/* There may be room for more; but what the daemon says meanwhile comes first. */
			managed->room += moved >= want;
		}
		/* Where nothing more comes back, what is hot may come for what is cold. */
		if (!managed->room && !prepared) {
			pthread_mutex_unlock(&session.lock);
			next = sooner(next, exchange_tick(managed->device));
			pthread_mutex_lock(&session.lock);
		}
		any |= want > 0;
		more |= want && managed->room;
	}
	if (due)
		session.next_move = session_now_ms() + MOVE_BACK;
	if (any)
		next = sooner(next, session.next_move - session_now_ms());
	pthread_mutex_unlock(&session.lock);
	return more ? 0 : next;
}

/* Sleeps; while others go behind, and something is pending, it says so. With the lock, which is not held meanwhile. */
static void rest(int64_t next)
{
	const int64_t until = session_now_ms() + next;
	bool stirs = false;

	pthread_mutex_unlock(&session.lock);
	while (!stirs && session_now_ms() < until && burst_tick())
		stirs = session_stirs(BURST_LOOK_US);
	pthread_mutex_lock(&session.lock);
	session_sleep(stirs ? 0 : until - session_now_ms());
}

static void *listen_to_it(void *unused)
{
	(void)unused;
	session_listening = true;
	ours_enter();
	pthread_setname_np(pthread_self(), "ggroup");
	for (;;) {
		int64_t next, tick;

		if (!link_ours(&session.pipe[0])) {
			pthread_mutex_lock(&session.lock);
			link_drop(&session.pipe[1]);
			link_pipe(session.pipe);
			pthread_mutex_unlock(&session.lock);
		}
		contact_make();
		contact_receive();
		command_grant();
		command_work();
		/* A program that stands by makes no call. */
		next = departure_begun() ? LONGEST : move_back();
		tick = departure_begun() ? -1 : counters_tick();
		if (tick >= 0)
			next = sooner(next, tick);
		if (!departure_begun() && turn_watch())
			next = 0;
		tick = lent_tick();
		if (tick >= 0)
			next = sooner(next, tick);
		pthread_mutex_lock(&session.lock);
		if (departure_begun() && session_now_ms() - session.departed_at > DEPARTED)
			session.broken = true;
		if (session.socket.fd < 0 && session.managed_count)
			next = sooner(next, session.next_try - session_now_ms());
		if (!session.broken && !session.command_count)
			rest(next);
		pthread_mutex_unlock(&session.lock);
	}
	return NULL;
}

static bool start(void)
{
	pthread_attr_t attributes;
	pthread_t thread;
	sigset_t all, before;
	bool started;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	started = !pthread_create(&thread, &attributes, listen_to_it, NULL);
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return started;
}

void listener_begin(void)
{
	const char *named = getenv("GGROUP_SOCKET");

	if (session.running)
		return;
	family_begin();
	if (!named || !*named)
		return;
	/* The program may change its environment. */
	if (strlen(named) >= sizeof(session.path)) {
		log_line("GGROUP_SOCKET is too long");
		return;
	}
	strcpy(session.path, named);
	if (link_pipe(session.pipe))
		return;
	session.running = start();
	if (session.running) {
		counters_wake = session_wake;	/* for every stream that was idle */
		burst_wake = session_wake;
	}
	else
		log_line("no thread: no daemon");
}

static bool begun;	/* while a device is set up: by one thread at a time */

static void known(struct device *device)
{
	if (!begun)
		listener_begin();
	begun = true;
	daemon_manage(device);
}

static void forget(void)
{
	begun = false;
}

LIFE(.stage = LIFE_DAEMON, .known = known, .forget = forget);
