// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "bare.h"
#include "burst.h"
#include "departure.h"
#include "detour.h"
#include "keeper.h"
#include "log.h"
#include "moment.h"
#include "mover.h"
#include "piece.h"
#include "session.h"
#include "turn.h"
#include "workset.h"

/* Return 0, or the errno to refuse with; fill in the answer. */
static int end_turn(struct device *device, const struct message *command, struct message *reply)
{
	const uint64_t start = moment_us();
	const bool again = turn_is_over(device);
	bool drained = false;
	int error = departure_begun() ? EBUSY : turn_end(device, command->args[0], &drained);

	if (!error && !again)
		workset_turn_over(device);
	if (!error && command->args[1])
		workset_prepared(device);
	/* Kernels of the library run until this is answered; one that runs longer is to end before the GPU is taken
	 * away. */
	if (!error && drained && command->args[1]) {
		mover_mark(device, command->args[1]);
		drained = mover_rests(device);
		workset_tell(device);	/* what of that need not be written */
	}
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

void command_end_turns(void)
{
	turn_open_all();
	device_each(end_bursts, NULL);
}

/* Take which programs go before which. The descriptor of the page, if there is one, is closed. */
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

/* Tell where the time went since `before`: people look for what takes long. */
static void tell_spent(struct device *device, const struct mover_spent *before, struct message *reply)
{
	const struct mover_spent now = mover_spent(device);

	reply->args[2] = now.waited - before->waited;
	reply->args[3] = now.closed - before->closed;
	reply->args[4] = now.made - before->made;
}

/* As end_turn. A wait until nothing runs would be in vain where something that the turn left runs still. */
static int prepare(struct device *device, const struct message *command, struct message *reply)
{
	struct mover_spent before;
	uint64_t usec;

	if (departure_begun() || turn_is_late(device))
		return EBUSY;
	before = mover_spent(device);
	workset_prepared(device);
	reply->args[0] = mover_prepare(device, command->args[0], &usec);
	reply->args[1] = usec;
	tell_spent(device, &before, reply);
	log_line("gpu %d: asked to prepare %llu MiB, moved %llu MiB in %llu us", device->index,
		 (unsigned long long)(command->args[0] / GG_MIB), (unsigned long long)(reply->args[0] / GG_MIB),
		 (unsigned long long)usec);
	workset_tell(device);
	return 0;
}

/* Have kernels run on some groups of SMs from the next launch on; or, asked alone, say which groups there are. As
 * end_turn. */
static int limit_sms(struct device *device, const struct message *command, struct message *reply)
{
	struct green_shape shape = { 0 };

	if (departure_begun())
		return EBUSY;
	if (green_shape(device->ordinal, &shape))
		return command->args[0] ? EOPNOTSUPP : 0;
	reply->args[0] = shape.groups;
	reply->args[1] = shape.each;
	reply->args[2] = shape.all;
	return command->args[1] ? 0 : detour_limit(device, command->args[0]);
}

/* Have a program that is about to be moved use no green context: the daemon says anew what holds where it goes. */
static int depart(const struct message *command)
{
	uint64_t masks[GG_DEVICES];
	struct device *devices[GG_DEVICES];
	int count = 0, error;

	pthread_mutex_lock(&session.lock);
	for (; count < session.managed_count; count++)
		devices[count] = session.managed[count].device;
	pthread_mutex_unlock(&session.lock);
	for (int i = 0; i < count; i++) {
		masks[i] = detour_mask(devices[i]->ordinal);
		detour_limit(devices[i], 0);
	}
	error = bare_end() ? departure_begin(command->args[0]) : EBUSY;
	for (int i = 0; i < count; i++) {
		if (error)
			detour_limit(devices[i], masks[i]);
		else
			detour_release(devices[i]);
	}
	return error;
}

static bool is_known(uint32_t op)
{
	return op == OP_RECLAIM || op == OP_END_TURN || op == OP_BEGIN_TURN || op == OP_PREPARE || op == OP_SMS;
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
		reply.status = -(departure_begun() ? EBUSY : depart(command));
		session.departed_at = session_now_ms();
		/* Where it goes it has no turns, and it waits at the other gate until then. Where it stays it has left
		 * the turn of that GPU alone: on another one it may wait for its turn still. */
		if (!reply.status) {
			command_end_turns();
		} else if (managed) {
			turn_open(managed->device);
		}
	} else if (!is_known(command->op)) {
		reply.status = -ENOSYS;
	} else if (!managed) {
		reply.status = -ENODEV;
	} else if (command->op == OP_END_TURN) {
		reply.status = -end_turn(managed->device, command, &reply);
	} else if (command->op == OP_BEGIN_TURN) {
		turn_begin(managed->device, command->args[0]);
	} else if (command->op == OP_PREPARE) {
		reply.status = -prepare(managed->device, command, &reply);
	} else if (command->op == OP_SMS) {
		reply.status = -limit_sms(managed->device, command, &reply);
	} else if (!departure_begun()) {
		const struct mover_spent before = mover_spent(managed->device);

		/* What it said of room before is over: what goes now would take the room that it goes for. */
		pthread_mutex_lock(&session.lock);
		managed->room = 0;
		pthread_mutex_unlock(&session.lock);
		moved = mover_out(managed->device, command->args[3], &usec);
		if (moved < command->args[3])
			moved += piece_out(managed->device, command->args[3] - moved, &usec);
		log_line("gpu %d: asked to move %llu MiB, moved %llu MiB in %llu us", managed->device->index,
			  (unsigned long long)(command->args[3] / GG_MIB), (unsigned long long)(moved / GG_MIB),
			  (unsigned long long)usec);
		reply.args[0] = moved;
		reply.args[1] = usec;
		tell_spent(managed->device, &before, &reply);
		workset_tell(managed->device);
	}
	pthread_mutex_lock(&session.lock);
	if (command->op == OP_PREPARE)
		session.moved_in_us += reply.args[1];
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

void command_work(void)
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

void command_grant(void)
{
	pthread_mutex_lock(&session.lock);
	for (int i = 0; i < session.managed_count; i++) {
		struct managed *managed = &session.managed[i];
		const uint64_t grant = managed->grant;

		if (!managed->granted)
			continue;
		managed->granted = false;
		pthread_mutex_unlock(&session.lock);
		log_line("gpu %d: granted %llu MiB of the host", managed->device->index,
			 (unsigned long long)(grant / GG_MIB));
		keeper_grant(managed->device, grant);
		pthread_mutex_lock(&session.lock);
	}
	pthread_mutex_unlock(&session.lock);
}
