// SPDX-License-Identifier: Apache-2.0
/* The listening thread: what the daemon asks is done there, and memory comes back. */
#include "listener.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "burst.h"
#include "calm.h"
#include "counters.h"
#include "daemon.h"
#include "departure.h"
#include "exchange.h"
#include "family.h"
#include "glibc.h"
#include "home.h"
#include "lent.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "mover.h"
#include "ours.h"
#include "session.h"
#include "totals.h"
#include "turn.h"

/* Milliseconds. */
#define RECONNECT 1000		/* between two tries */
#define MOVE_BACK 250		/* between two tries to get memory back */
#define LONGEST 2000		/* sleep */
#define DEPARTED 120000		/* for the daemon to move us, and to let us go on */
#define ALONE 5000		/* until what was imported comes home, if no daemon says that it may */

/* Bytes that come back in one go; then the daemon has a word. */
#define MOVE_BACK_PIECE (4096 * GG_MIB)

static int64_t sooner(int64_t one, int64_t other)
{
	return one < other ? one : other;
}

/* What the daemon asks */

/* 0, or the errno to refuse with; fills in what is answered. */
static int end_turn(struct device *device, const struct message *command, struct message *reply)
{
	const uint64_t start = moment_us();
	bool drained = false;
	int error = departure_begun() ? EBUSY : turn_end(device, command->args[0], &drained);

	reply->args[0] = !error && drained;
	reply->args[1] = moment_us() - start;
	return error;
}

static void end_bursts(struct device *device, void *unused)
{
	(void)unused;
	burst_end(device);
	turn_yield(device, 0);
}

/* Which programs go before which. The descriptor of the page, if there is one, is ours. */
static void rank(const struct message *command, int fd)
{
	struct managed *managed;
	struct device *device;

	pthread_mutex_lock(&session.lock);
	managed = session_find_index(command->gpu);
	device = managed ? managed->device : NULL;
	pthread_mutex_unlock(&session.lock);
	if (device && !departure_begun() && command->op == OP_LEAD)
		burst_lead(device, fd, command->args[0]);
	else if (device && !departure_begun() && command->args[0] < BURST_LEADERS)
		turn_yield(device, burst_follow(device, (unsigned int)command->args[0], fd) ? command->args[1] : 0);
	if (fd >= 0)
		close(fd);
}

static void obey(const struct message *command)
{
	struct message reply = { .op = command->op | OP_REPLY, .seq = command->seq, .gpu = command->gpu };
	struct managed *managed;
	uint64_t usec = 0, moved;

	pthread_mutex_lock(&session.lock);
	managed = session_find_index(command->gpu);
	pthread_mutex_unlock(&session.lock);
	if (command->op == OP_DEPART) {
		reply.status = -(departure_begun() ? EBUSY : departure_begin(command->args[0]));
		session.departed_at = session_now_ms();
		/* Where it goes it has no turns, and it waits at the other gate until then. Where it stays it has left
		 * the turn of that GPU alone: on another one it may wait for its turn still. */
		if (!reply.status) {
			turn_open_all();
			device_each(end_bursts, NULL);
		} else if (managed) {
			turn_open(managed->device);
		}
	} else if (command->op != OP_RECLAIM && command->op != OP_END_TURN && command->op != OP_BEGIN_TURN) {
		reply.status = -ENOSYS;
	} else if (!managed) {
		reply.status = -ENODEV;
	} else if (command->op == OP_END_TURN) {
		reply.status = -end_turn(managed->device, command, &reply);
	} else if (command->op == OP_BEGIN_TURN) {
		turn_begin(managed->device, command->args[0]);
	} else if (!departure_begun()) {
		moved = mover_out(managed->device, command->args[3], &usec);
		log_line("gpu %d: asked to move %llu MiB, moved %llu MiB in %llu us", managed->device->index,
			  (unsigned long long)(command->args[3] / GG_MIB), (unsigned long long)(moved / GG_MIB),
			  (unsigned long long)usec);
		reply.args[0] = moved;
		reply.args[1] = usec;
	}
	pthread_mutex_lock(&session.lock);
	if (managed && command->op == OP_RECLAIM && !departure_begun()) {
		/* Less than was moved, where some of it was freed meanwhile. */
		reply.args[0] = mover_booked(managed->device);
		managed->resident -= reply.args[0];
		managed->swapped += reply.args[0];
		session.next_move = session_now_ms() + MOVE_BACK;
	}
	while (!session.broken && session_say(managed, &reply) == EAGAIN) {
		session.clogged = true;
		session_sleep(100);
		session.clogged = false;
		session_drain();
	}
	pthread_mutex_unlock(&session.lock);
}

/* Does what was asked. The lock is not held. */
static void work(void)
{
	for (;;) {
		struct message command;
		int fd;

		pthread_mutex_lock(&session.lock);
		if (!session.command_count || session.broken) {
			pthread_mutex_unlock(&session.lock);
			return;
		}
		command = session.commands[0];
		fd = session.command_fds[0];
		memmove(session.commands, session.commands + 1, (size_t)--session.command_count * sizeof(command));
		memmove(session.command_fds, session.command_fds + 1, (size_t)session.command_count * sizeof(fd));
		pthread_mutex_unlock(&session.lock);
		if (command.op == OP_LEAD || command.op == OP_FOLLOW) {
			rank(&command, fd);
			continue;
		}
		if (fd >= 0)
			close(fd);
		obey(&command);
	}
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
		if (want && (due || managed->room) && !calm_rests(managed->device)) {
			managed->room = 0;
			pthread_mutex_unlock(&session.lock);
			moved = mover_in(managed->device, want, &usec);
			if (moved)
				log_line("gpu %d: moved %llu MiB back in %llu us", managed->device->index,
					  (unsigned long long)(moved / GG_MIB), (unsigned long long)usec);
			pthread_mutex_lock(&session.lock);
			session.moved_in_us += usec;
			/* There may be room for more; but what the daemon says meanwhile comes first. */
			managed->room += moved >= want;
		}
		/* Where nothing more comes back, what is hot may come for what is cold. */
		if (!managed->room) {
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

/* The connection */

static void lose(void)
{
	/* What had us stand by has done with us, or is gone. */
	if (departure_begun())
		departure_end();
	/* There is no daemon that would begin its turn, or say which programs there are. */
	turn_open_all();
	device_each(end_bursts, NULL);
	pthread_mutex_lock(&session.lock);
	if (session.socket.fd >= 0) {
		log_line("the daemon is gone");
		session.lost_at = session_now_ms();
		link_drop(&session.socket);
	}
	session.broken = session.clogged = false;
	while (session.command_count)
		if (session.command_fds[--session.command_count] >= 0)
			close(session.command_fds[session.command_count]);
	for (int i = 0; i < session.managed_count; i++) {
		struct managed *managed = &session.managed[i];

		managed->ours = managed->strange = false;
		managed->freed_resident = managed->freed_swapped = managed->room = 0;
		managed->tried = true;
		session_number(managed, -1);
	}
	for (struct waiter *waiter = session.waiters; waiter; waiter = waiter->next) {
		/* Granted: here, so that the next daemon is told of it, whichever thread wakes up first. */
		if (waiter->message.op == OP_CHARGE && !waiter->done && !waiter->lost)
			waiter->managed->resident += waiter->message.args[0];
		waiter->lost = true;
	}
	pthread_cond_broadcast(&session.changed);
	pthread_mutex_unlock(&session.lock);
	totals_share(NULL);
}

static void share(int fd)
{
	struct stat status;
	void *page;

	/* A page that we had before stays mapped: a thread may be about to count on it. One that can be
	 * cut off would end the program (SIGBUS): no daemon of ours hands that out. */
	if (!glibc_fstat(fd, &status) && status.st_size >= (off_t)sizeof(struct totals_page) &&
	    fcntl(fd, F_GET_SEALS) >= 0 && (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)) {
		page = mmap(NULL, sizeof(struct totals_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (page != MAP_FAILED)
			totals_share(page);
	}
	close(fd);
}

/* Asks something that is not about a device that is managed; the lock is held. */
static bool greet(struct waiter *waiter, int64_t ms)
{
	return session_ask_listening(waiter, ms, work) && !waiter->message.status;
}

static void manage(struct managed *managed)
{
	struct waiter waiter = { .message = { .op = OP_LOCATE } };

	if (!(session.features & FEATURE_MEMORY)) {
		managed->strange = true;
		return;
	}
	memcpy(waiter.message.args, &managed->device->uuid, sizeof(managed->device->uuid));
	if (!greet(&waiter, GREETING)) {
		managed->strange = !session.broken;
		return;
	}
	if (waiter.message.args[0] >= GG_DEVICES) {
		managed->strange = true;
		return;
	}
	session_number(managed, (int)waiter.message.args[0]);
	waiter = (struct waiter){ 0 };
	/* What is freed or granted from here on is told after it. No thread says anything of the device
	 * before the answer. */
	waiter.message = session_about(OP_MANAGE, managed, managed->resident, managed->swapped);
	managed->freed_resident = managed->freed_swapped = 0;
	if (!greet(&waiter, ANSWER)) {
		log_line("gpu %d: not managed, error %d", managed->device->index, -waiter.message.status);
		session_number(managed, -1);
		managed->strange = !session.broken;
		if (waiter.fd >= 0)
			close(waiter.fd);
		return;
	}
	managed->ours = true;
	/* A daemon begins with that. */
	managed->foreign = managed->exchanged = managed->away = managed->intact = managed->lent = 0;
	managed->report = false;
	session_note(managed);
	log_line("gpu %d: managed, with %llu MiB", managed->device->index,
		  (unsigned long long)(managed->resident / GG_MIB));
	if (waiter.fd >= 0) {
		pthread_mutex_unlock(&session.lock);
		share(waiter.fd);
		pthread_mutex_lock(&session.lock);
	}
}

/* Tells of the families of the program, before anything of it is charged; the lock is held. */
static void tell_families(void)
{
	struct waiter waiter;

	for (unsigned int number = 0;; number++) {
		waiter = (struct waiter){ 0 };
		if (!family_request(number, &waiter.message))
			break;
		if (!greet(&waiter, ANSWER)) {
			if (!session.broken)
				family_refused(-waiter.message.status);
			return;
		}
	}
	family_taken();
}

/* Says which version we are; the lock is held. What the daemon says that it can comes with the answer: nothing, from
 * one of 0.1. */
static bool meet(void)
{
	struct waiter hello = { .message = { .op = OP_HELLO, .args = { WIRE_VERSION, FEATURES } } };
	uint64_t said;

	if (!greet(&hello, GREETING))
		return false;
	said = hello.message.args[3];
	session.features = FEATURES & (said ? said : FEATURES_FIRST);
	if (session.features != FEATURES)
		log_line("the daemon lacks features %#llx", (unsigned long long)(FEATURES & ~session.features));
	if (session.features & FEATURE_FAMILY)
		tell_families();
	return true;
}

/* Connects where there is no connection, and tells of the devices that it does not know. */
static void connect_and_manage(void)
{
	int error = 0;

	pthread_mutex_lock(&session.lock);
	if (session.socket.fd < 0 && session.managed_count && session_now_ms() >= session.next_try) {
		session.next_try = session_now_ms() + RECONNECT;
		error = link_open(&session.socket, session.path);
		if (error)
			log_line("%s: %s", session.path, strerror(error));
		else if (!meet())
			session.broken = true;
	}
	for (int i = 0; i < session.managed_count; i++) {
		struct managed *managed = &session.managed[i];

		if (session.socket.fd >= 0 && !session.broken && !managed->ours && !managed->strange)
			manage(managed);
		managed->tried |= session.socket.fd < 0 || managed->ours || managed->strange;
	}
	pthread_cond_broadcast(&session.changed);
	pthread_mutex_unlock(&session.lock);
}

/* Takes what has come, and sends what could not be sent; gives up a connection that is broken. */
static void receive(void)
{
	bool lost;

	pthread_mutex_lock(&session.lock);
	if (session.socket.fd >= 0)
		session_drain();
	session.clogged = false;
	for (int i = 0; i < session.managed_count; i++) {
		/* What is made changes what is intact with each call: that is told when this thread next looks. */
		session_note(&session.managed[i]);
		if (session.managed[i].ours && session_flush(&session.managed[i]) == EAGAIN)
			session.clogged = true;
	}
	lost = session.broken;
	pthread_cond_broadcast(&session.changed);	/* a thread that found the socket full tries again */
	pthread_mutex_unlock(&session.lock);
	if (lost)
		lose();
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
		connect_and_manage();
		receive();
		work();
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
