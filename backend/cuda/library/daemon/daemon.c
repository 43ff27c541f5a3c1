// SPDX-License-Identifier: Apache-2.0
#include "daemon.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "family.h"
#include "life.h"
#include "moment.h"
#include "session.h"

/* Milliseconds that a lost daemon has to come back; until then nothing moves back to the GPU. */
#define RESTART 5000

void daemon_manage(struct device *device)
{
	struct managed *managed;
	int64_t until = session_now_ms() + ANSWER;

	if (!session.running)
		return;
	pthread_mutex_lock(&session.lock);
	if (!session_find(device) && session.managed_count < GG_DEVICES) {
		managed = &session.managed[session.managed_count++];
		*managed = (struct managed){
			.device = device, .resident = device->resident, .swapped = device->swapped,
		};
		session.next_try = 0;
		session_wake();
		while (!managed->tried && session_wait(until))
			;
	}
	pthread_mutex_unlock(&session.lock);
}

int daemon_charge(struct device *device, uint64_t bytes)
{
	struct waiter waiter = { 0 };
	int64_t until = session_now_ms() + ANSWER;
	int error = 0;

	if (!session.running)
		return 0;
	pthread_mutex_lock(&session.lock);
	waiter.managed = session_find(device);
	/* The daemon is being told what is there: a charge is added to that afterwards. */
	while (waiter.managed && session.socket.fd >= 0 && !waiter.managed->ours && !waiter.managed->strange &&
	       waiter.managed->device->index >= 0 && session_wait(until))
		;
	if (waiter.managed && waiter.managed->ours && !session.broken) {
		waiter.message = session_about(OP_CHARGE, waiter.managed, bytes, 0);
		if (!session_ask(&waiter)) {
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
	pthread_mutex_unlock(&session.lock);
	return error;
}

void daemon_uncharge(struct device *device, uint64_t resident, uint64_t swapped)
{
	struct managed *managed;

	if (!session.running || !(resident | swapped))
		return;
	pthread_mutex_lock(&session.lock);
	managed = session_find(device);
	if (managed) {
		resident = at_most(resident, managed->resident);
		swapped = at_most(swapped, managed->swapped);
		managed->resident -= resident;
		managed->swapped -= swapped;
		managed->freed_resident += resident;
		managed->freed_swapped += swapped;
		if (managed->ours && session_flush(managed) == EAGAIN && !session_listening)
			session_wake();
	}
	pthread_mutex_unlock(&session.lock);
}

int daemon_move_in(struct device *device, uint64_t bytes)
{
	struct waiter waiter = { 0 };
	struct managed *managed;
	bool answered;
	int error = 0;

	if (!session.running)
		return 0;
	pthread_mutex_lock(&session.lock);
	managed = session_find(device);
	if (managed && managed->ours && !session.broken) {
		waiter.managed = managed;
		waiter.message = session_about(OP_MOVE_IN, managed, bytes, session.moved_in_us);
		/* Without a valid answer the memory stays where it is. */
		answered = session_listening ? session_ask_listening(&waiter, GREETING, NULL) : session_ask(&waiter);
		error = answered && !waiter.message.status ? 0 : EAGAIN;
		session.moved_in_us = error ? session.moved_in_us : 0;
	} else if (managed && (session.broken || (!managed->strange &&
						   session_now_ms() - session.lost_at < RESTART))) {
		error = EAGAIN;
	}
	if (managed && !error) {
		managed->resident += bytes;
		managed->swapped -= at_most(bytes, managed->swapped);
	}
	pthread_mutex_unlock(&session.lock);
	return error;
}

bool daemon_knows_managed(struct device *device)
{
	bool knows = true;

	if (!session.running)
		return true;
	pthread_mutex_lock(&session.lock);
	if (session_find(device) && session.socket.fd >= 0)
		knows = session.features & FEATURE_MANAGED;
	pthread_mutex_unlock(&session.lock);
	return knows;
}

bool daemon_limits(struct device *device, uint64_t *total, uint64_t *free)
{
	struct waiter waiter = { 0 };
	bool limited = false;

	if (!session.running)
		return false;
	pthread_mutex_lock(&session.lock);
	waiter.managed = session_find(device);
	if (waiter.managed && waiter.managed->ours && !session.broken && !session_listening) {
		waiter.message = session_about(OP_LIMITS, waiter.managed, 0, 0);
		limited = session_ask(&waiter) && !waiter.message.status && waiter.message.args[0] != UINT64_MAX;
	}
	pthread_mutex_unlock(&session.lock);
	if (limited) {
		*total = waiter.message.args[0];
		*free = waiter.message.args[1];
	}
	return limited;
}

void daemon_report(struct device *device)
{
	struct managed *managed;

	if (!session.running)
		return;
	pthread_mutex_lock(&session.lock);
	managed = session_find(device);
	if (managed) {
		session_note(managed);
		if (managed->ours && session_flush(managed) == EAGAIN && !session_listening)
			session_wake();
	}
	pthread_mutex_unlock(&session.lock);
}

void daemon_forget(void)
{
	session.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	moment_condition(&session.changed);
	link_drop(&session.socket);
	link_drop(&session.pipe[0]);
	link_drop(&session.pipe[1]);
	for (int i = 0; i < session.command_count; i++)
		if (session.command_fds[i] >= 0)
			close(session.command_fds[i]);
	session.running = session.broken = session.clogged = session_listening = false;
	session.waiters = NULL;
	session.managed_count = session.command_count = 0;
	session.next_try = session.next_move = session.lost_at = 0;
	family_forget();
}

LIFE(.stage = LIFE_DAEMON, .forget = daemon_forget);
