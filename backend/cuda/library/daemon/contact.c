// SPDX-License-Identifier: Apache-2.0
#include "contact.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "command.h"
#include "departure.h"
#include "detour.h"
#include "family.h"
#include "glibc.h"
#include "log.h"
#include "session.h"
#include "space.h"
#include "totals.h"

/* Milliseconds between two tries to connect. */
#define RECONNECT 1000

static void lose(void)
{
	/* What had the program stand by has done with it, or is gone. */
	if (departure_begun())
		departure_end();
	/* There is no daemon that would begin its turn, or say which programs there are. */
	command_end_turns();
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

	/* An earlier page stays mapped: a thread may be about to count on it. One that can be cut off would end the
	 * program (SIGBUS): no daemon of this project hands that out. */
	if (!glibc_fstat(fd, &status) && status.st_size >= (off_t)sizeof(struct totals_page) &&
	    fcntl(fd, F_GET_SEALS) >= 0 && (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)) {
		page = mmap(NULL, sizeof(struct totals_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (page != MAP_FAILED)
			totals_share(page);
	}
	close(fd);
}

/* Ask something that is not about a device that is managed; with the lock. */
static bool greet(struct waiter *waiter, int64_t ms)
{
	return session_ask_listening(waiter, ms, command_work) && !waiter->message.status;
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
	waiter.message.args[2] = detour_mask(managed->device->ordinal);
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
	managed->held = managed->used = managed->wanted = managed->clean = managed->unified = 0;
	managed->report_host = false;
	/* What the last daemon granted holds until this one says another thing, if it can. */
	managed->granted = !(session.features & FEATURE_HOST);
	managed->grant = UINT64_MAX;
	session_note(managed);
	log_line("gpu %d: managed, with %llu MiB", managed->device->index,
		  (unsigned long long)(managed->resident / GG_MIB));
	if (waiter.fd >= 0) {
		pthread_mutex_unlock(&session.lock);
		share(waiter.fd);
		pthread_mutex_lock(&session.lock);
	}
}

/* Tell of the families of the program, before anything of it is charged; with the lock. */
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

/* Say the version of the library; with the lock. The features of the daemon come with the answer: nothing, from one of
 * 0.1. */
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
	/* A daemon that comes later is told where the program is; it stays there whatever that one says. */
	hello = (struct waiter){ 0 };
	if (session.features & FEATURE_SPACE && space_request(&hello.message))
		greet(&hello, ANSWER);
	return !session.broken;
}

void contact_make(void)
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

void contact_receive(void)
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
