// SPDX-License-Identifier: Apache-2.0
#include "session.h"

#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include "moment.h"

/* Milliseconds that the listening thread sleeps at most: the program may have closed what wakes us. */
#define LONGEST 2000

/* Bytes of the host by which what was told of it has to be wrong to be told anew. */
#define HOST_STEP (64 * GG_MIB)

struct session session = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.changed = PTHREAD_COND_INITIALIZER,
	.socket = { .fd = -1 },
	.pipe = { { .fd = -1 }, { .fd = -1 } },
};
__thread bool session_listening;

int64_t session_now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * INT64_C(1000) + now.tv_nsec / 1000000;
}

bool session_wait(int64_t until)
{
	static bool made;	/* with the lock: what is woken before the first wait is nothing */
	struct timespec end = { until / 1000, until % 1000 * 1000000 };

	if (!made)
		moment_condition(&session.changed);
	made = true;
	return pthread_cond_timedwait(&session.changed, &session.lock, &end) != ETIMEDOUT;
}

void session_wake(void)
{
	if (link_ours(&session.pipe[1]) && write(session.pipe[1].fd, "", 1) < 0)
		return;		/* full: it is awake */
}

struct managed *session_find(const struct device *device)
{
	for (int i = 0; i < session.managed_count; i++)
		if (session.managed[i].device == device)
			return &session.managed[i];
	return NULL;
}

struct managed *session_find_index(uint32_t index)
{
	for (int i = 0; i < session.managed_count; i++)
		if (session.managed[i].ours && session.managed[i].device->index == (int)index)
			return &session.managed[i];
	return NULL;
}

void session_number(struct managed *managed, int index)
{
	__atomic_store_n(&managed->device->index, index, __ATOMIC_RELEASE);
}

/* Sending */

/* 0, or EAGAIN for a socket that is full; whatever else, the connection is given up. */
static int transmit(const struct message *message)
{
	int error = session.broken ? EPIPE : link_send(&session.socket, message);

	if (error == EAGAIN || error == ENOBUFS)
		return EAGAIN;
	if (error) {
		session.broken = true;
		session_wake();
	}
	return error;
}

struct message session_about(enum op op, const struct managed *managed, uint64_t first, uint64_t second)
{
	return (struct message){ .op = op, .gpu = (uint32_t)managed->device->index, .args = { first, second } };
}

/* Whether one figure of the host is what another was, as far as the daemon has to know. */
static bool is_near(uint64_t one, uint64_t other)
{
	return (one > other ? one - other : other - one) < HOST_STEP && !one == !other;
}

/* What of the host it wants is told at once; what it has of that, by steps. */
static void note_host(struct managed *managed)
{
	const struct device *device = managed->device;
	const uint64_t held = __atomic_load_n(&device->host_held, __ATOMIC_RELAXED);
	const uint64_t used = __atomic_load_n(&device->host_used, __ATOMIC_RELAXED);
	const uint64_t wanted = __atomic_load_n(&device->host_wanted, __ATOMIC_RELAXED);
	const uint64_t clean = __atomic_load_n(&device->clean, __ATOMIC_RELAXED);
	const uint64_t unified = __atomic_load_n(&device->managed, __ATOMIC_RELAXED);

	if (unified == managed->unified && wanted == managed->wanted && is_near(held, managed->held) &&
	    is_near(used, managed->used) && is_near(clean, managed->clean))
		return;
	managed->held = held;
	managed->used = used;
	managed->wanted = wanted;
	managed->clean = clean;
	managed->unified = unified;
	managed->report_host = true;
}

void session_note(struct managed *managed)
{
	const struct device *device = managed->device;
	const uint64_t foreign = __atomic_load_n(&device->foreign, __ATOMIC_RELAXED);
	const uint64_t exchanged = __atomic_load_n(&device->exchanged, __ATOMIC_RELAXED);
	const uint64_t away = __atomic_load_n(&device->away, __ATOMIC_RELAXED);
	const uint64_t intact = __atomic_load_n(&device->intact, __ATOMIC_RELAXED);
	const uint64_t lent = __atomic_load_n(&device->lent, __ATOMIC_RELAXED);

	managed->report |= managed->foreign != foreign || managed->exchanged != exchanged || managed->away != away ||
			   managed->intact != intact || managed->lent != lent;
	note_host(managed);
	managed->foreign = foreign;
	managed->exchanged = exchanged;
	managed->away = away;
	managed->intact = intact;
	managed->lent = lent;
}

/* What was freed, and could not be told. An event, which has no answer. */
int session_flush(struct managed *managed)
{
	struct message message;
	int error;

	if (managed->freed_resident || managed->freed_swapped) {
		message = session_about(OP_UNCHARGE, managed, managed->freed_resident, managed->freed_swapped);
		error = transmit(&message);
		if (error)
			return error;
		managed->freed_resident = managed->freed_swapped = 0;
	}
	if (managed->report && session.features & FEATURE_REPORT) {
		message = session_about(OP_REPORT, managed, managed->foreign, managed->exchanged);
		message.args[2] = managed->away;
		message.args[3] = managed->intact;
		message.args[4] = managed->lent;
		error = transmit(&message);
		if (error)
			return error;
		managed->report = false;
	}
	if (managed->report_host && session.features & FEATURE_HOST) {
		message = session_about(OP_HOST, managed, managed->held, managed->used);
		message.args[2] = managed->wanted;
		message.args[3] = managed->clean;
		message.args[4] = session.features & FEATURE_MANAGED ? managed->unified : 0;
		error = transmit(&message);
		if (error)
			return error;
		managed->report_host = false;
	}
	return 0;
}

/* What was freed is told first: the limits may have room by that. */
int session_say(struct managed *managed, const struct message *message)
{
	int error = managed ? session_flush(managed) : 0;

	return error ? error : transmit(message);
}

static void expect(struct waiter *waiter)
{
	waiter->message.seq = ++session.last_seq;
	waiter->fd = -1;
	waiter->next = session.waiters;
	session.waiters = waiter;
}

static void forget(struct waiter *waiter)
{
	for (struct waiter **at = &session.waiters; *at; at = &(*at)->next) {
		if (*at == waiter) {
			*at = waiter->next;
			return;
		}
	}
}

bool session_ask(struct waiter *waiter)
{
	int64_t until = session_now_ms() + ANSWER;
	int error;

	expect(waiter);
	while (!waiter->lost && (error = session_say(waiter->managed, &waiter->message)) == EAGAIN) {
		session.clogged = true;
		session_wake();
		if (!session_wait(until))
			break;
	}
	while (!waiter->done && !waiter->lost && !session.broken)
		if (!session_wait(until)) {
			/* Told anew what is there, it will know better. */
			session.broken = true;
			session_wake();
		}
	forget(waiter);
	return waiter->done;
}

/* Receiving */

static void take(const struct message *message, int fd)
{
	if (message->op & OP_REPLY) {
		for (struct waiter *waiter = session.waiters; waiter; waiter = waiter->next) {
			if (waiter->message.seq == message->seq && !waiter->done) {
				waiter->message = *message;
				/* The page of counters: no other answer comes with one. */
				if (message->op == (OP_MANAGE | OP_REPLY)) {
					waiter->fd = fd;
					fd = -1;
				}
				waiter->done = true;
				pthread_cond_broadcast(&session.changed);
				break;
			}
		}
	} else if (message->op == OP_ROOM) {
		struct managed *managed = session_find_index(message->gpu);

		if (managed)
			managed->room = message->args[0];
	} else if (message->op == OP_GRANT) {
		struct managed *managed = session_find_index(message->gpu);

		if (managed) {
			managed->granted = true;
			managed->grant = message->args[0];
		}
	} else if (message->op >= OP_EVENTS && message->op != OP_LEAD && message->op != OP_FOLLOW) {
		/* Of a daemon that knows more than we do. */
	} else if (session.command_count < COMMANDS) {
		session.command_fds[session.command_count] = fd;
		session.commands[session.command_count++] = *message;
		fd = -1;
	} else {
		session.broken = true;
	}
	if (fd >= 0)
		close(fd);
}

void session_drain(void)
{
	struct message message;
	int error, fd;

	while (!session.broken && !(error = link_receive(&session.socket, &message, &fd)))
		take(&message, fd);
	if (!session.broken && error != EAGAIN)
		session.broken = true;
}

static int usable(const struct descriptor *descriptor)
{
	return link_ours(descriptor) ? descriptor->fd : -1;
}

void session_sleep(int64_t timeout)
{
	struct pollfd fds[2] = {
		{ .fd = usable(&session.pipe[0]), .events = POLLIN },
		{ .fd = usable(&session.socket), .events = POLLIN | (session.clogged ? POLLOUT : 0) },
	};
	char bytes[64];

	pthread_mutex_unlock(&session.lock);
	timeout = timeout < 0 ? 0 : timeout > LONGEST ? LONGEST : timeout;
	/* What a thread does before it wakes us is looked at afterwards: so the pipe is emptied first. */
	if (poll(fds, 2, (int)timeout) > 0 && fds[0].revents)
		while (link_ours(&session.pipe[0]) &&
		       read(session.pipe[0].fd, bytes, sizeof(bytes)) == sizeof(bytes))
			;
	pthread_mutex_lock(&session.lock);
}

bool session_stirs(unsigned int us)
{
	struct pollfd fds[2];
	const struct timespec time = { 0, (long)us * 1000 };

	pthread_mutex_lock(&session.lock);
	fds[0] = (struct pollfd){ .fd = usable(&session.pipe[0]), .events = POLLIN };
	fds[1] = (struct pollfd){ .fd = usable(&session.socket), .events = POLLIN | (session.clogged ? POLLOUT : 0) };
	pthread_mutex_unlock(&session.lock);
	return ppoll(fds, 2, &time, NULL) > 0;
}

bool session_ask_listening(struct waiter *waiter, int64_t ms, void (*work)(void))
{
	int64_t until = session_now_ms() + ms, left;
	bool sent = false;

	expect(waiter);
	while (!waiter->done && !session.broken) {
		if (!sent) {
			int error = session_say(waiter->managed, &waiter->message);

			sent = !error;
			session.clogged = error == EAGAIN;
		}
		left = until - session_now_ms();
		if (left <= 0)
			session.broken = true;
		if (session.broken)
			break;
		session_sleep(left);
		session_drain();
		/* What comes with the answer waits until it is taken: for the page, say, that came with it. */
		if (work && session.command_count && !waiter->done) {
			pthread_mutex_unlock(&session.lock);
			work();
			pthread_mutex_lock(&session.lock);
		}
	}
	forget(waiter);
	return waiter->done;
}

