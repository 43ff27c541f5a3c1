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
/* The first answer for each GPU, by whichever name it was asked: CUDA's numbers are not NVML's. Under the lock. */
static struct { CUuuid uuid; uint64_t most; } answers[GG_ORDINALS];
static int answer_count;

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

/* As the listening thread does (contact.c): the limits of a family may bound the program. */
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

/* Without a GPU the question is which space the program is to be in, and `total` is the answer. */
static enum answer converse(const CUuuid *uuid, uint64_t feature, struct sight *sight)
{
	struct message message = { .op = OP_HELLO, .args = { WIRE_VERSION, FEATURES } };
	enum answer answer = ask(&message, GREETING);
	uint64_t features;

	if (answer != ANSWERED)
		return answer;
	if (message.status)	/* another version, or no GPU */
		return ANSWERED;
	features = message.args[3] ? message.args[3] : FEATURES_FIRST;
	if (!(features & feature))
		return OLDER;
	if (features & FEATURE_FAMILY) {
		answer = tell_families();
		if (answer != ANSWERED)
			return answer;
	}
	if (!uuid) {
		message = (struct message){ .op = OP_SPACE };
		answer = ask(&message, ANSWER);
		if (answer == ANSWERED)
			sight->total = message.status ? 0 : message.args[0];
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
		*sight = (struct sight){ message.args[0], features & FEATURE_VIEW ? message.args[1] : UINT64_MAX,
					 features & FEATURE_VIEW ? message.args[2] : 0 };
	return answer;
}

static enum answer try(const char *path, const CUuuid *uuid, uint64_t feature, struct sight *sight)
{
	const int error = link_open(&line, path);
	enum answer answer;

	if (error) {
		log_line("%s: %s", path, strerror(error));
		return error == EAGAIN ? BUSY : ABSENT;
	}
	answer = converse(uuid, feature, sight);
	link_drop(&line);
	return answer;
}

/* Where nothing listens, there is no daemon. One that listened and went away is waited for, as it may be being
 * replaced. */
static enum answer find(const char *path, const CUuuid *uuid, uint64_t feature, struct sight *sight)
{
	const int64_t until = session_now_ms() + RESTART;
	int lost = 0;
	enum answer answer;

	for (;;) {
		answer = try(path, uuid, feature, sight);
		lost += answer == LOST;
		if (answer == ANSWERED || answer == OLDER || answer == SILENT || (answer == ABSENT && !lost) ||
		    lost == LOST_MOST || session_now_ms() > until)
			return answer;
		nap();
	}
}

/* Return the first answer for a GPU; NULL where there was none. Called with the lock. */
static const uint64_t *answered(const CUuuid *uuid)
{
	for (int i = 0; i < answer_count; i++)
		if (!memcmp(&answers[i].uuid, uuid, sizeof(*uuid)))
			return &answers[i].most;
	return NULL;
}

static void keep(const CUuuid *uuid, uint64_t most)
{
	if (answer_count == GG_ORDINALS)
		return;
	answers[answer_count].uuid = *uuid;
	answers[answer_count++].most = most;
}

static enum answer ask_daemon(const CUuuid *uuid, uint64_t feature, struct sight *sight)
{
	const char *path = getenv("GGROUP_SOCKET");

	family_begin();
	return path && *path ? find(path, uuid, feature, sight) : ABSENT;
}

void sight_look(CUdevice ordinal, const CUuuid *uuid)
{
	struct sight sight = { .total = UINT64_MAX };
	enum answer answer = ABSENT;
	const uint64_t *before;
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	pthread_mutex_lock(&lock);
	if (!sight_looked(ordinal)) {
		before = answered(uuid);
		if (before)
			sight.total = *before;
		else
			answer = ask_daemon(uuid, FEATURE_TOTAL, &sight);
		if (!before && answer != OLDER)
			keep(uuid, sight.total);
		sights[ordinal].most = sight.total;
		__atomic_store_n(&sights[ordinal].state, answer == OLDER ? LEFT : KEPT, __ATOMIC_RELEASE);
		if (sight.total == UINT64_MAX)
			log_line("device %d: looks as large as it is: no limit bounds its memory", ordinal);
		else
			log_line("device %d: looks as if it had at most %llu MiB", ordinal,
				 (unsigned long long)(sight.total / GG_MIB));
	}
	pthread_mutex_unlock(&lock);
	pthread_setcancelstate(cancel, NULL);
}

bool sight_view(const CUuuid *uuid, struct sight *sight)
{
	const uint64_t *before;
	enum answer answer;
	int cancel;

	*sight = (struct sight){ UINT64_MAX, UINT64_MAX, 0 };
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	pthread_mutex_lock(&lock);
	answer = ask_daemon(uuid, FEATURE_VIEW, sight);
	before = answered(uuid);
	if (before)
		sight->total = *before;
	else if (answer == ANSWERED)
		keep(uuid, sight->total);
	pthread_mutex_unlock(&lock);
	pthread_setcancelstate(cancel, NULL);
	return before || answer == ANSWERED;
}

bool sight_space(uint64_t *number)
{
	struct sight sight = { 0 };
	enum answer answer;
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	pthread_mutex_lock(&lock);
	answer = ask_daemon(NULL, FEATURE_SPACE, &sight);
	pthread_mutex_unlock(&lock);
	pthread_setcancelstate(cancel, NULL);
	*number = sight.total;
	return answer == ANSWERED;
}

void sight_forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	link_drop(&line);
	family_forget();
	memset(sights, 0, sizeof(sights));
	answer_count = 0;
}

LIFE(.stage = LIFE_DAEMON, .forget = sight_forget);
