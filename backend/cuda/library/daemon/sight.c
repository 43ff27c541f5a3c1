// SPDX-License-Identifier: Apache-2.0
#include "sight.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "family.h"
#include "life.h"
#include "log.h"
#include "session.h"

/* Milliseconds. */
#define RESTART 5000		/* for a daemon that is replaced while it is asked */
#define AGAIN 50		/* between two tries */
/* Connections that may end without an answer: a daemon that does so each time serves other programs. */
#define LOST_MOST 3

enum answer {
	ANSWERED,	/* or this device has no answer, and will have none */
	OLDER,		/* the daemon does not know the question */
	ABSENT,		/* nothing listens there */
	LOST,		/* the daemon went away, or is short of something: another try may work */
	BUSY,		/* many connections wait already */
	SILENT,		/* the daemon takes too long */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;	/* one question at a time */
static struct descriptor line = { .fd = -1 };
/* Written under the lock, `state` last and atomically. */
static struct { enum { UNKNOWN, KEPT, LEFT } state; uint64_t most; } sights[GG_ORDINALS];

static int state_of(CUdevice ordinal)
{
	return ordinal < 0 || ordinal >= GG_ORDINALS ? LEFT :
						       (int)__atomic_load_n(&sights[ordinal].state, __ATOMIC_ACQUIRE);
}

bool sight_looked(CUdevice ordinal)
{
	return state_of(ordinal) != UNKNOWN;
}

bool sight_kept(CUdevice ordinal, uint64_t *most)
{
	if (state_of(ordinal) != KEPT)
		return false;
	*most = sights[ordinal].most;
	return true;
}

static void nap(void)
{
	const struct timespec time = { .tv_nsec = AGAIN * 1000000L };

	nanosleep(&time, NULL);
}

/* Send a message, and replace it by its answer. The program waits, so no other message comes between. */
static enum answer ask(struct message *message, int64_t ms)
{
	static uint64_t seq;
	const int64_t until = session_now_ms() + ms;
	struct message reply = { 0 };
	int error, fd;

	message->seq = ++seq;
	if (link_send(&line, message))
		return LOST;
	for (;;) {
		struct pollfd ready = { .fd = line.fd, .events = POLLIN };
		const int64_t left = until - session_now_ms();

		error = link_receive(&line, &reply, &fd);
		if (fd >= 0)
			close(fd);
		if (!error && reply.op == (message->op | OP_REPLY) && reply.seq == message->seq) {
			*message = reply;
			return ANSWERED;
		}
		if (error && error != EAGAIN)
			return LOST;
		if (left <= 0)
			return SILENT;
		if (error)
			poll(&ready, 1, (int)left);
	}
}

/* As the listening thread does (listener.c): the limits of a family may bound the program. */
static enum answer tell_families(void)
{
	struct message message;
	enum answer answer;

	for (unsigned int number = 0; family_request(number, &message); number++) {
		answer = ask(&message, ANSWER);
		if (answer != ANSWERED)
			return answer;
		if (message.status) {
			family_refused(-message.status);
			return ANSWERED;
		}
	}
	family_taken();
	return ANSWERED;
}

static enum answer converse(const CUuuid *uuid, uint64_t *most)
{
	struct message message = { .op = OP_HELLO, .args = { WIRE_VERSION, FEATURES } };
	enum answer answer = ask(&message, GREETING);
	uint64_t features;

	if (answer != ANSWERED)
		return answer;
	if (message.status)	/* another version, or no GPU */
		return ANSWERED;
	features = message.args[3] ? message.args[3] : FEATURES_FIRST;
	if (!(features & FEATURE_TOTAL))
		return OLDER;
	if (features & FEATURE_FAMILY) {
		answer = tell_families();
		if (answer != ANSWERED)
			return answer;
	}
	message = (struct message){ .op = OP_LOCATE };
	memcpy(message.args, uuid, sizeof(*uuid));
	answer = ask(&message, GREETING);
	if (answer != ANSWERED || message.status)	/* a GPU of no tree */
		return answer;
	message = (struct message){ .op = OP_TOTAL, .gpu = (uint32_t)message.args[0] };
	answer = ask(&message, ANSWER);
	if (answer == ANSWERED && message.status)
		return message.status == -ENODEV ? ANSWERED : LOST;
	if (answer == ANSWERED)
		*most = message.args[0];
	return answer;
}

static enum answer try(const char *path, const CUuuid *uuid, uint64_t *most)
{
	const int error = link_open(&line, path);
	enum answer answer;

	if (error) {
		log_line("%s: %s", path, strerror(error));
		return error == EAGAIN ? BUSY : ABSENT;
	}
	answer = converse(uuid, most);
	link_drop(&line);
	return answer;
}

/* Where nothing listens, there is no daemon. One that listened and went away is waited for, as it may be being
 * replaced. */
static enum answer find(const char *path, const CUuuid *uuid, uint64_t *most)
{
	const int64_t until = session_now_ms() + RESTART;
	int lost = 0;
	enum answer answer;

	for (;;) {
		answer = try(path, uuid, most);
		lost += answer == LOST;
		if (answer == ANSWERED || answer == OLDER || answer == SILENT || (answer == ABSENT && !lost) ||
		    lost == LOST_MOST || session_now_ms() > until)
			return answer;
		nap();
	}
}

void sight_look(CUdevice ordinal, const CUuuid *uuid)
{
	const char *path = getenv("GGROUP_SOCKET");
	uint64_t most = UINT64_MAX;
	enum answer answer = ABSENT;
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	pthread_mutex_lock(&lock);
	if (!sight_looked(ordinal)) {
		family_begin();
		if (path && *path)
			answer = find(path, uuid, &most);
		sights[ordinal].most = most;
		__atomic_store_n(&sights[ordinal].state, answer == OLDER ? LEFT : KEPT, __ATOMIC_RELEASE);
		log_line("device %d: looks as if it had at most %llu MiB", ordinal,
			 (unsigned long long)(most / GG_MIB));
	}
	pthread_mutex_unlock(&lock);
	pthread_setcancelstate(cancel, NULL);
}

void sight_forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	link_drop(&line);
	memset(sights, 0, sizeof(sights));
}

LIFE(.stage = LIFE_DAEMON, .forget = sight_forget);
