/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon was told of each device is kept here too (struct managed), apart from what the allocator counts: a
 * daemon that comes later, or again, is told exactly that (MANAGE), so the two never drift apart. Figures change, and the
 * message about it goes out, under one lock; so messages are in the order of what they tell.
 */
#include "daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "counters.h"
#include "link.h"
#include "mover.h"

/* Milliseconds. */
#define RECONNECT 1000		/* between two tries */
#define ANSWER 15000		/* for an answer of the daemon; then we go on without it */
#define GREETING 2000
#define MOVE_BACK 250		/* between two tries to get memory back */
#define RESTART 5000		/* a daemon that went away may be back by then: nothing moves back until it is over */
#define LONGEST 2000		/* sleep: somebody may have closed what wakes us */

/* Bytes that come back in one go; then the daemon has a word. */
#define MOVE_BACK_PIECE (4096 * GG_MIB)
#define COMMANDS 64

struct managed {
	struct device *device;
	uint64_t resident, swapped;	/* as the daemon knows them, or is to know them */
	uint64_t freed_resident, freed_swapped;	/* not told yet: the socket was full */
	uint64_t foreign;
	bool report;
	bool tried;		/* whoever waits in daemon_manage waits no longer */
	bool ours;		/* the daemon that we are connected to manages it */
	bool strange;		/* ... or does not know it */
	uint64_t room;		/* it said that so much may come back */
};

/* A request that is waited for. */
struct waiter {
	struct waiter *next;
	struct managed *managed;
	struct message message;	/* the request, then the answer */
	int fd;			/* that came with it */
	bool done;
	bool lost;		/* there will be no answer */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool running;		/* there is a thread */
static bool broken;		/* the connection is to be given up */
static bool clogged;		/* somebody waits for room in the socket */
static char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
static struct descriptor socket_ = { .fd = -1 };
static struct descriptor pipe_[2] = { { .fd = -1 }, { .fd = -1 } };
static uint64_t last_seq;
static struct waiter *waiters;
static struct managed table[GG_DEVICES];
static int managed_count;

/* Of the listening thread alone. */
static struct message commands[COMMANDS];
static int command_count;
static int64_t next_try, next_move, lost_at;
static uint64_t moved_in_us;	/* not told yet */
static __thread bool listening;

static int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * INT64_C(1000) + now.tv_nsec / 1000000;
}

static uint64_t at_most(uint64_t amount, uint64_t most)
{
	return amount < most ? amount : most;
}

/* Waits for something to change; false after `ms`. The lock is held. */
static bool wait_changed(int64_t until)
{
	struct timespec end = { until / 1000, until % 1000 * 1000000 };

	return pthread_cond_clockwait(&changed, &lock, CLOCK_MONOTONIC, &end) != ETIMEDOUT;
}

static void wake(void)
{
	if (descriptor_ours(&pipe_[1]) && write(pipe_[1].fd, "", 1) < 0)
		return;		/* full: it is awake */
}

/* counters.c wakes us for every stream that was idle: without a lock. */
static void wake_for_counters(void)
{
	wake();
}

static struct managed *find(const struct device *device)
{
	for (int i = 0; i < managed_count; i++)
		if (table[i].device == device)
			return &table[i];
	return NULL;
}

static struct managed *find_index(uint32_t index)
{
	for (int i = 0; i < managed_count; i++)
		if (table[i].ours && table[i].device->index == (int)index)
			return &table[i];
	return NULL;
}

/* Launches count on the line of that number. */
static void number(struct managed *managed, int index)
{
	__atomic_store_n(&managed->device->index, index, __ATOMIC_RELEASE);
}

/* Sending. The lock is held. */

/* 0, or EAGAIN for a socket that is full; whatever else, the connection is given up. */
static int transmit(const struct message *message)
{
	int error = broken ? EPIPE : link_send(&socket_, message);

	if (error == EAGAIN || error == ENOBUFS)
		return EAGAIN;
	if (error) {
		broken = true;
		wake();
	}
	return error;
}

static struct message about(enum op op, const struct managed *managed, uint64_t first, uint64_t second)
{
	return (struct message){ .op = op, .gpu = (uint32_t)managed->device->index, .args = { first, second } };
}

/* What was freed, and could not be told. An event: nobody waits for an answer. */
static int flush(struct managed *managed)
{
	struct message message;
	int error;

	if (managed->freed_resident || managed->freed_swapped) {
		message = about(OP_UNCHARGE, managed, managed->freed_resident, managed->freed_swapped);
		error = transmit(&message);
		if (error)
			return error;
		managed->freed_resident = managed->freed_swapped = 0;
	}
	if (managed->report) {
		message = about(OP_REPORT, managed, managed->foreign, 0);
		error = transmit(&message);
		if (error)
			return error;
		managed->report = false;
	}
	return 0;
}

/* What was freed is told before anything else is said of a device, whose limits may have room by that. */
static int say(struct managed *managed, const struct message *message)
{
	int error = managed ? flush(managed) : 0;

	return error ? error : transmit(message);
}

static void expect(struct waiter *waiter)
{
	waiter->message.seq = ++last_seq;
	waiter->fd = -1;
	waiter->next = waiters;
	waiters = waiter;
}

static void forget(struct waiter *waiter)
{
	for (struct waiter **at = &waiters; *at; at = &(*at)->next) {
		if (*at == waiter) {
			*at = waiter->next;
			return;
		}
	}
}

/* Asks and waits, in a thread of the program; false without an answer. */
static bool ask(struct waiter *waiter)
{
	int64_t until = now_ms() + ANSWER;
	int error;

	expect(waiter);
	while (!waiter->lost && (error = say(waiter->managed, &waiter->message)) == EAGAIN) {
		clogged = true;
		wake();
		if (!wait_changed(until))
			break;
	}
	while (!waiter->done && !waiter->lost && !broken)
		if (!wait_changed(until)) {
			/* Told anew what is there, it will know better. */
			broken = true;
			wake();
		}
	forget(waiter);
	return waiter->done;
}

/* Receiving, by the listening thread. The lock is held. */

static void take(const struct message *message, int fd)
{
	if (message->op & OP_REPLY) {
		for (struct waiter *waiter = waiters; waiter; waiter = waiter->next) {
			if (waiter->message.seq == message->seq && !waiter->done) {
				waiter->message = *message;
				waiter->fd = fd;
				fd = -1;
				waiter->done = true;
				pthread_cond_broadcast(&changed);
				break;
			}
		}
	} else if (message->op == OP_ROOM) {
		struct managed *managed = find_index(message->gpu);

		if (managed)
			managed->room = message->args[0];
	} else if (command_count < COMMANDS) {
		commands[command_count++] = *message;
	} else {
		broken = true;
	}
	if (fd >= 0)
		close(fd);
}

static void drain(void)
{
	struct message message;
	int error, fd;

	while (!broken && !(error = link_receive(&socket_, &message, &fd)))
		take(&message, fd);
	if (!broken && error != EAGAIN)
		broken = true;
}

/* Sleeps until there is something to do, `timeout` ms at most. The lock is held, but not meanwhile. */
static void sleep_until_woken(int64_t timeout)
{
	struct pollfd fds[2] = {
		{ .fd = descriptor_ours(&pipe_[0]) ? pipe_[0].fd : -1, .events = POLLIN },
		{ .fd = descriptor_ours(&socket_) ? socket_.fd : -1, .events = POLLIN | (clogged ? POLLOUT : 0) },
	};
	char bytes[64];

	pthread_mutex_unlock(&lock);
	timeout = timeout < 0 ? 0 : timeout > LONGEST ? LONGEST : timeout;
	/* What somebody does before he wakes us is looked at afterwards: so the pipe is emptied first. */
	if (poll(fds, 2, (int)timeout) > 0 && fds[0].revents)
		while (descriptor_ours(&pipe_[0]) && read(pipe_[0].fd, bytes, sizeof(bytes)) == sizeof(bytes))
			;
	pthread_mutex_lock(&lock);
}

static void work(void);

/*
 * Asks, in the listening thread, which goes on receiving meanwhile; false without an answer. `busy`: it is in the middle of
 * a move, and what it is asked to do waits.
 */
static bool ask_listening(struct waiter *waiter, int64_t ms, bool busy)
{
	int64_t until = now_ms() + ms, left;
	bool sent = false;

	expect(waiter);
	while (!waiter->done && !broken) {
		if (!sent) {
			int error = say(waiter->managed, &waiter->message);

			sent = !error;
			clogged = error == EAGAIN;
		}
		left = until - now_ms();
		if (left <= 0)
			broken = true;
		if (broken)
			break;
		sleep_until_woken(left);
		drain();
		if (!busy && command_count) {
			pthread_mutex_unlock(&lock);
			work();
			pthread_mutex_lock(&lock);
		}
	}
	forget(waiter);
	return waiter->done;
}

/* What the daemon asks */

static void reclaim(const struct message *command)
{
	struct message reply = { .op = command->op | OP_REPLY, .seq = command->seq, .gpu = command->gpu };
	struct managed *managed;
	uint64_t usec = 0, moved;

	pthread_mutex_lock(&lock);
	managed = find_index(command->gpu);
	pthread_mutex_unlock(&lock);
	if (command->op != OP_RECLAIM || !managed) {
		reply.status = command->op == OP_RECLAIM ? -ENODEV : -ENOSYS;
	} else {
		moved = mover_out(managed->device, command->args[3], &usec);
		state_log("gpu %d: asked to move %llu MiB, moved %llu MiB in %llu us", managed->device->index,
			  (unsigned long long)(command->args[3] / GG_MIB), (unsigned long long)(moved / GG_MIB),
			  (unsigned long long)usec);
		reply.args[0] = moved;
		reply.args[1] = usec;
	}
	pthread_mutex_lock(&lock);
	if (managed && !reply.status) {
		/* Less than was moved, where some of it was freed meanwhile. */
		reply.args[0] = mover_booked(managed->device);
		managed->resident -= reply.args[0];
		managed->swapped += reply.args[0];
		next_move = now_ms() + MOVE_BACK;
	}
	while (!broken && say(managed, &reply) == EAGAIN) {
		clogged = true;
		sleep_until_woken(100);
		clogged = false;
		drain();
	}
	pthread_mutex_unlock(&lock);
}

/* Does what was asked. The lock is not held. */
static void work(void)
{
	for (;;) {
		struct message command;

		pthread_mutex_lock(&lock);
		if (!command_count || broken) {
			pthread_mutex_unlock(&lock);
			return;
		}
		command = commands[0];
		memmove(commands, commands + 1, (size_t)--command_count * sizeof(command));
		pthread_mutex_unlock(&lock);
		reclaim(&command);
	}
}

/* Memory comes back where there is room, or there may be; returns the ms until it is to be tried again. */
static int64_t move_back(void)
{
	bool due, any = false, more = false;
	int64_t left;

	pthread_mutex_lock(&lock);
	due = now_ms() >= next_move;
	for (int i = 0; i < managed_count; i++) {
		struct managed *managed = &table[i];
		uint64_t want = at_most(managed->swapped, MOVE_BACK_PIECE), moved, usec;

		if (want && (due || managed->room)) {
			managed->room = 0;
			pthread_mutex_unlock(&lock);
			moved = mover_in(managed->device, want, &usec);
			if (moved)
				state_log("gpu %d: moved %llu MiB back in %llu us", managed->device->index,
					  (unsigned long long)(moved / GG_MIB), (unsigned long long)usec);
			pthread_mutex_lock(&lock);
			moved_in_us += usec;
			/* There may be room for more; but what the daemon says meanwhile comes first. */
			managed->room += moved >= want;
		}
		any |= managed->swapped > 0;
		more |= managed->swapped && managed->room;
	}
	if (due)
		next_move = now_ms() + MOVE_BACK;
	left = more ? 0 : any ? next_move - now_ms() : LONGEST;
	pthread_mutex_unlock(&lock);
	return left;
}

/* The connection */

static void lose(void)
{
	pthread_mutex_lock(&lock);
	if (socket_.fd >= 0) {
		state_log("the daemon is gone");
		lost_at = now_ms();
		descriptor_drop(&socket_);
	}
	broken = clogged = false;
	command_count = 0;
	for (int i = 0; i < managed_count; i++) {
		table[i].ours = table[i].strange = false;
		table[i].freed_resident = table[i].freed_swapped = table[i].room = 0;
		table[i].tried = true;
		number(&table[i], -1);
	}
	for (struct waiter *waiter = waiters; waiter; waiter = waiter->next) {
		/* Granted: here, so that the next daemon is told of it, whoever wakes up first. */
		if (waiter->message.op == OP_CHARGE && !waiter->done && !waiter->lost)
			waiter->managed->resident += waiter->message.args[0];
		waiter->lost = true;
	}
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	counters_share(NULL);
}

static void share(int fd)
{
	struct stat status;
	void *page;

	/* A page that we had before stays mapped: somebody may be about to count on it. */
	if (!fstat(fd, &status) && status.st_size >= (off_t)sizeof(struct counters_page)) {
		page = mmap(NULL, sizeof(struct counters_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (page != MAP_FAILED)
			counters_share(page);
	}
	close(fd);
}

/* Asks something that is not about a device that is managed; the lock is held. */
static bool greet(struct waiter *waiter, int64_t ms)
{
	return ask_listening(waiter, ms, false) && !waiter->message.status;
}

static void manage(struct managed *managed)
{
	struct waiter waiter = { .message = { .op = OP_LOCATE } };

	memcpy(waiter.message.args, &managed->device->uuid, sizeof(managed->device->uuid));
	if (!greet(&waiter, GREETING)) {
		managed->strange = !broken;
		return;
	}
	if (waiter.message.args[0] >= GG_DEVICES) {
		managed->strange = true;
		return;
	}
	number(managed, (int)waiter.message.args[0]);
	waiter = (struct waiter){ 0 };
	/* What is freed or granted from here on is told after it. Nobody says anything of the device before the answer. */
	waiter.message = about(OP_MANAGE, managed, managed->resident, managed->swapped);
	managed->freed_resident = managed->freed_swapped = 0;
	if (!greet(&waiter, ANSWER)) {
		state_log("gpu %d: not managed, error %d", managed->device->index, -waiter.message.status);
		number(managed, -1);
		managed->strange = !broken;
		if (waiter.fd >= 0)
			close(waiter.fd);
		return;
	}
	managed->ours = true;
	managed->foreign = __atomic_load_n(&managed->device->foreign, __ATOMIC_RELAXED);
	managed->report = managed->foreign > 0;
	state_log("gpu %d: managed, with %llu MiB", managed->device->index,
		  (unsigned long long)(managed->resident / GG_MIB));
	if (waiter.fd >= 0) {
		pthread_mutex_unlock(&lock);
		share(waiter.fd);
		pthread_mutex_lock(&lock);
	}
}

/* Connects where there is no connection, and tells of the devices that it does not know. */
static void connect_and_manage(void)
{
	struct waiter hello = { .message = { .op = OP_HELLO, .args = { WIRE_VERSION } } };
	int error = 0;

	pthread_mutex_lock(&lock);
	if (socket_.fd < 0 && managed_count && now_ms() >= next_try) {
		next_try = now_ms() + RECONNECT;
		error = link_open(&socket_, path);
		if (error)
			state_log("%s: %s", path, strerror(error));
		else if (!greet(&hello, GREETING))
			broken = true;
	}
	for (int i = 0; i < managed_count; i++) {
		if (socket_.fd >= 0 && !broken && !table[i].ours && !table[i].strange)
			manage(&table[i]);
		table[i].tried |= socket_.fd < 0 || table[i].ours || table[i].strange;
	}
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

/* Takes what has come, and sends what could not be sent; gives up a connection that is broken. */
static void receive(void)
{
	bool lost;

	pthread_mutex_lock(&lock);
	if (socket_.fd >= 0)
		drain();
	clogged = false;
	for (int i = 0; i < managed_count; i++)
		if (table[i].ours && flush(&table[i]) == EAGAIN)
			clogged = true;
	lost = broken;
	pthread_cond_broadcast(&changed);	/* whoever found the socket full tries again */
	pthread_mutex_unlock(&lock);
	if (lost)
		lose();
}

static void *listen_(void *unused)
{
	(void)unused;
	listening = true;
	state_enter();
	pthread_setname_np(pthread_self(), "ggroup");
	for (;;) {
		int64_t back, tick;

		if (!descriptor_ours(&pipe_[0])) {
			pthread_mutex_lock(&lock);
			descriptor_drop(&pipe_[1]);
			link_pipe(pipe_);
			pthread_mutex_unlock(&lock);
		}
		connect_and_manage();
		receive();
		work();
		back = move_back();
		tick = counters_tick();
		if (tick >= 0 && tick < back)
			back = tick;
		pthread_mutex_lock(&lock);
		if (socket_.fd < 0 && managed_count)
			back = at_most((uint64_t)back, (uint64_t)(next_try > now_ms() ? next_try - now_ms() : 0));
		if (!broken && !command_count)
			sleep_until_woken(back);
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

void daemon_begin(void)
{
	const char *named = getenv("GGROUP_SOCKET");
	pthread_attr_t attributes;
	pthread_t thread;
	sigset_t all, before;

	if (running || !named || !*named)
		return;
	/* The program may change its environment. */
	if (strlen(named) >= sizeof(path)) {
		state_log("GGROUP_SOCKET is too long");
		return;
	}
	strcpy(path, named);
	if (link_pipe(pipe_))
		return;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	running = !pthread_create(&thread, &attributes, listen_, NULL);
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (running)
		counters_wake = wake_for_counters;
	else
		state_log("no thread: no daemon");
}

void daemon_manage(struct device *device)
{
	struct managed *managed;
	int64_t until = now_ms() + ANSWER;

	if (!running)
		return;
	pthread_mutex_lock(&lock);
	if (!find(device) && managed_count < GG_DEVICES) {
		managed = &table[managed_count++];
		*managed = (struct managed){
			.device = device, .resident = device->resident, .swapped = device->swapped,
		};
		next_try = 0;
		wake();
		while (!managed->tried && wait_changed(until))
			;
	}
	pthread_mutex_unlock(&lock);
}

int daemon_charge(struct device *device, uint64_t bytes)
{
	struct waiter waiter = { 0 };
	int64_t until = now_ms() + ANSWER;
	int error = 0;

	if (!running)
		return 0;
	pthread_mutex_lock(&lock);
	waiter.managed = find(device);
	/* It is being told of what is there: to be added to that afterwards. */
	while (waiter.managed && socket_.fd >= 0 && !waiter.managed->ours && !waiter.managed->strange &&
	       waiter.managed->device->index >= 0 && wait_changed(until))
		;
	if (waiter.managed && waiter.managed->ours && !broken) {
		waiter.message = about(OP_CHARGE, waiter.managed, bytes, 0);
		if (!ask(&waiter)) {
			if (!waiter.lost)	/* else lose() has counted it */
				waiter.managed->resident += bytes;
		} else if (waiter.message.status == -ENOMEM) {
			error = ENOMEM;
		} else {
			waiter.managed->resident += bytes;
		}
	} else if (waiter.managed) {
		waiter.managed->resident += bytes;
	}
	pthread_mutex_unlock(&lock);
	return error;
}

void daemon_uncharge(struct device *device, uint64_t resident, uint64_t swapped)
{
	struct managed *managed;

	if (!running || !(resident | swapped))
		return;
	pthread_mutex_lock(&lock);
	managed = find(device);
	if (managed) {
		resident = at_most(resident, managed->resident);
		swapped = at_most(swapped, managed->swapped);
		managed->resident -= resident;
		managed->swapped -= swapped;
		managed->freed_resident += resident;
		managed->freed_swapped += swapped;
		if (managed->ours && flush(managed) == EAGAIN && !listening)
			wake();
	}
	pthread_mutex_unlock(&lock);
}

int daemon_move_in(struct device *device, uint64_t bytes)
{
	struct waiter waiter = { 0 };
	struct managed *managed;
	int error = 0;

	if (!running)
		return 0;
	pthread_mutex_lock(&lock);
	managed = find(device);
	if (managed && managed->ours && !broken) {
		waiter.managed = managed;
		waiter.message = about(OP_MOVE_IN, managed, bytes, moved_in_us);
		/* Without an answer, or with one that makes no sense, it stays where it is. */
		error = (listening ? ask_listening(&waiter, GREETING, true) : ask(&waiter)) && !waiter.message.status ?
			0 : EAGAIN;
		moved_in_us = error ? moved_in_us : 0;
	} else if (managed && (broken || (!managed->strange && now_ms() - lost_at < RESTART))) {
		error = EAGAIN;
	}
	if (managed && !error) {
		managed->resident += bytes;
		managed->swapped -= at_most(bytes, managed->swapped);
	}
	pthread_mutex_unlock(&lock);
	return error;
}

bool daemon_limits(struct device *device, uint64_t *total, uint64_t *free)
{
	struct waiter waiter = { 0 };
	bool limited = false;

	if (!running)
		return false;
	pthread_mutex_lock(&lock);
	waiter.managed = find(device);
	if (waiter.managed && waiter.managed->ours && !broken && !listening) {
		waiter.message = about(OP_LIMITS, waiter.managed, 0, 0);
		limited = ask(&waiter) && !waiter.message.status && waiter.message.args[0] != UINT64_MAX;
	}
	pthread_mutex_unlock(&lock);
	if (limited) {
		*total = waiter.message.args[0];
		*free = waiter.message.args[1];
	}
	return limited;
}

void daemon_report(struct device *device)
{
	struct managed *managed;
	uint64_t foreign = __atomic_load_n(&device->foreign, __ATOMIC_RELAXED);

	if (!running)
		return;
	pthread_mutex_lock(&lock);
	managed = find(device);
	if (managed && managed->foreign != foreign) {
		managed->foreign = foreign;
		managed->report = true;
		if (managed->ours && flush(managed) == EAGAIN && !listening)
			wake();
	}
	pthread_mutex_unlock(&lock);
}

void daemon_forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	descriptor_drop(&socket_);
	descriptor_drop(&pipe_[0]);
	descriptor_drop(&pipe_[1]);
	running = broken = clogged = listening = false;
	waiters = NULL;
	managed_count = command_count = 0;
	next_try = next_move = lost_at = 0;
	counters_wake = NULL;
}
