// SPDX-License-Identifier: GPL-2.0
/* Providers: how they come and go, the commands that they read, and the answers that they write. */

#include <linux/container_of.h>
#include <linux/err.h>
#include <linux/lockdep.h>
#include <linux/pid.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/uaccess.h>

#include "arrival.h"
#include "device.h"
#include "file.h"
#include "group.h"
#include "lever.h"
#include "process.h"
#include "provider.h"
#include "queue.h"
#include "trace.h"

/*
 * The seq of a message: a group's id or an arrival's number, and the kind, with room for 15 levers.
 */
#define GGROUP_SEQ_SHIFT	4
#define GGROUP_SEQ_KIND		((1U << GGROUP_SEQ_SHIFT) - 1)

static_assert(GGROUP_ARRIVAL <= GGROUP_SEQ_KIND);

/**
 * struct ggroup_taken - a message that a provider is about to get
 * @message: the message
 * @flight: for a lever, the number of the command
 */
struct ggroup_taken {
	struct ggroup_message message;
	u64 flight;
};

/* Coming and going */

bool ggroup_provider_come(struct ggroup_device *device, const struct ggroup_file *file)
{
	struct ggroup_queue *queue = &device->queue;
	struct ggroup *group;
	int bucket, kind;

	lockdep_assert_held_write(&device->lock);
	if (queue->online)
		return false;
	/*
	 * Before it is online: no caller may be told that a lever holds which the provider was not
	 * told of.
	 */
	hash_for_each(device->processes, bucket, group, name) {
		spin_lock(&queue->lock);
		for (kind = 0; kind < GGROUP_LEVERS && !group->dead; kind++)
			ggroup_lever_replay(queue, &group->levers[kind]);
		spin_unlock(&queue->lock);
	}
	spin_lock(&queue->lock);
	queue->provider = file;
	queue->process = get_pid(task_tgid(current));
	queue->online = true;
	spin_unlock(&queue->lock);
	return true;
}

void ggroup_provider_go(struct ggroup_device *device, bool released)
{
	struct ggroup_queue *queue = &device->queue;
	struct ggroup_order *order, *next;
	struct ggroup *group;
	int bucket, kind;

	lockdep_assert_held_write(&device->lock);
	spin_lock(&queue->lock);
	queue->online = false;
	queue->provider = NULL;
	put_pid(queue->process);
	queue->process = NULL;
	spin_unlock(&queue->lock);
	/*
	 * Now nothing is added. One group at a time, so that no CPU spins for as long as all of
	 * them take.
	 */
	hash_for_each(device->processes, bucket, group, name) {
		spin_lock(&queue->lock);
		for (kind = 0; kind < GGROUP_LEVERS; kind++)
			ggroup_lever_bereave(queue, &group->levers[kind], released);
		spin_unlock(&queue->lock);
	}
	/* Only arrivals are left. */
	spin_lock(&queue->lock);
	list_splice_init(&queue->arriving, &queue->orders);
	list_for_each_entry_safe(order, next, &queue->orders, node)
		ggroup_arrival_answer(queue, container_of(order, struct ggroup_arrival, order),
				      -ENODEV);
	spin_unlock(&queue->lock);
	wake_up_interruptible_poll(&queue->readers, EPOLLERR | EPOLLHUP);
}

/* Reading */

static void write_message(struct ggroup_message *message, u32 op, u64 seq, u64 id, struct pid *pid,
			  u64 start)
{
	*message = (struct ggroup_message) {
		.op = op,
		.seq = seq,
		.args = { id, pid_vnr(pid), start },
	};
}

static u32 op_of(const struct ggroup_lever *lever)
{
	switch (lever->order.kind) {
#define GGROUP_LEVER(name, bit, field)	case GGROUP_LEVER_##bit: return GGROUP_OP_SET_##bit;
#include "settings.def"
	case GGROUP_LEVER_RUNLIST:
		return lever->sent ? GGROUP_OP_DETACH_TSG : GGROUP_OP_ATTACH_TSG;
	default:
		return GGROUP_OP_RECLAIM;
	}
}

/* Return the fourth word of the command in flight. */
static u64 argument_of(const struct ggroup_lever *lever)
{
	if (lever->order.kind != GGROUP_LEVER_RUNLIST)
		return lever->sent;
	WARN_ON_ONCE(lever->sent > GGROUP_RUNLIST_OFF_GR);
	return lever->sent == GGROUP_RUNLIST_OFF_GR ? GGROUP_ENGINES_GR : GGROUP_ENGINES_ALL;
}

static struct ggroup *group_of(struct ggroup_lever *lever)
{
	return container_of(lever - lever->order.kind, struct ggroup, levers[0]);
}

static void take_lever(struct ggroup_queue *queue, struct ggroup_lever *lever,
		       struct ggroup_taken *taken)
{
	struct ggroup *group = group_of(lever);
	unsigned int kind = lever->order.kind;

	ggroup_lever_take(queue, lever);
	taken->flight = lever->flight;
	write_message(&taken->message, op_of(lever), group->id << GGROUP_SEQ_SHIFT | kind,
		      group->id, group->pid, group->start);
	taken->message.args[3] = argument_of(lever);
}

static void take_arrival(struct ggroup_queue *queue, struct ggroup_arrival *arrival,
			 struct ggroup_taken *taken)
{
	list_move_tail(&arrival->order.node, &queue->arriving);
	/* The start, too, is as the reader sees it, which may live in another time namespace. */
	write_message(&taken->message, GGROUP_OP_ARRIVE,
		      arrival->number << GGROUP_SEQ_SHIFT | GGROUP_ARRIVAL, 0,
		      task_tgid(arrival->leader), ggroup_process_start(arrival->leader));
}

static int take(struct ggroup_queue *queue, const struct ggroup_file *file,
		struct ggroup_taken *taken)
{
	struct ggroup_order *order;
	int err = 0;

	spin_lock(&queue->lock);
	order = list_first_entry_or_null(&queue->orders, struct ggroup_order, node);
	if (queue->provider != file)
		err = -ENODEV;
	else if (!order)
		err = -EAGAIN;
	else if (order->kind == GGROUP_ARRIVAL)
		take_arrival(queue, container_of(order, struct ggroup_arrival, order), taken);
	else
		take_lever(queue, container_of(order, struct ggroup_lever, order), taken);
	spin_unlock(&queue->lock);
	return err;
}

static void untake(struct ggroup_queue *queue, const struct ggroup_taken *taken)
{
	u64 number = taken->message.seq >> GGROUP_SEQ_SHIFT;
	unsigned int kind = taken->message.seq & GGROUP_SEQ_KIND;
	struct ggroup_arrival *arrival;
	struct ggroup *group = NULL;

	if (kind != GGROUP_ARRIVAL) {
		group = ggroup_group_find(number);
		if (!group)
			return;
	}
	spin_lock(&queue->lock);
	if (group) {
		/* Not if the provider went meanwhile, and the next one was told. */
		if (group->levers[kind].flight == taken->flight)
			ggroup_lever_untake(queue, &group->levers[kind]);
	} else {
		arrival = ggroup_arrival_find(queue, number);
		if (arrival)
			list_move(&arrival->order.node, &queue->orders);
	}
	wake_up_interruptible_poll(&queue->readers, EPOLLIN | EPOLLRDNORM);
	spin_unlock(&queue->lock);
	if (group)
		ggroup_group_put(group);
}

static bool readable(struct ggroup_queue *queue, const struct ggroup_file *file)
{
	bool yes;

	spin_lock(&queue->lock);
	yes = queue->provider != file || !list_empty(&queue->orders);
	spin_unlock(&queue->lock);
	return yes;
}

ssize_t ggroup_provider_read(struct ggroup_file *file, char __user *to, size_t size, bool nonblock)
{
	struct ggroup_queue *queue = &file->device->queue;
	struct ggroup_taken taken;
	size_t done = 0;
	int err;

	if (size < sizeof(taken.message))
		return -EINVAL;
	do {
		err = take(queue, file, &taken);
		if (err == -EAGAIN && !done && !nonblock) {
			err = wait_event_interruptible(queue->readers, readable(queue, file));
			if (!err)
				continue;
		}
		if (err)
			break;
		if (copy_to_user(to + done, &taken.message, sizeof(taken.message))) {
			untake(queue, &taken);
			err = -EFAULT;
			break;
		}
		done += sizeof(taken.message);
	} while (size - done >= sizeof(taken.message));
	return done ?: err;
}

/* Writing */

static int lever_answered(struct ggroup_queue *queue, const struct ggroup_file *file,
			  const struct ggroup_message *message)
{
	struct ggroup *group = ggroup_group_find(message->seq >> GGROUP_SEQ_SHIFT);
	u32 op = message->op & ~GGROUP_MESSAGE_REPLY;
	struct ggroup_lever *lever;
	int status = message->status, err = -EINVAL;
	u64 value = 0;

	if (!group)
		return -EINVAL;
	lever = &group->levers[message->seq & GGROUP_SEQ_KIND];
	if (&group->device->queue == queue) {
		spin_lock(&queue->lock);
		if (queue->provider != file) {
			err = -ENODEV;
		} else if (lever->flight && op == op_of(lever)) {
			value = lever->sent;
			/* An impossible figure is no answer. */
			if (message->args[0] > GGROUP_MAX)
				status = -EINVAL;
			ggroup_lever_settle(queue, lever, status, message->args[0]);
			err = 0;
		}
		spin_unlock(&queue->lock);
	}
	if (!err)
		trace_ggroup_tsg(group->id, op, value, status);
	ggroup_group_put(group);
	return err;
}

static int arrival_answered(struct ggroup_queue *queue, const struct ggroup_file *file,
			    const struct ggroup_message *message)
{
	struct ggroup_arrival *arrival;
	int err = 0;

	if (message->op != (GGROUP_OP_ARRIVE | GGROUP_MESSAGE_REPLY))
		return -EINVAL;
	spin_lock(&queue->lock);
	arrival = ggroup_arrival_find(queue, message->seq >> GGROUP_SEQ_SHIFT);
	if (queue->provider != file)
		err = -ENODEV;
	else if (!arrival)
		err = -EINVAL;
	else
		ggroup_arrival_answer(queue, arrival, message->status);
	spin_unlock(&queue->lock);
	return err;
}

static int answered(struct ggroup_queue *queue, const struct ggroup_file *file,
		    const struct ggroup_message *message)
{
	unsigned int kind;

	if (!(message->op & GGROUP_MESSAGE_REPLY) || message->gpu || message->flags ||
	    message->status > 0 || message->status < -MAX_ERRNO)
		return -EINVAL;
	kind = message->seq & GGROUP_SEQ_KIND;
	if (kind > GGROUP_ARRIVAL)
		return -EINVAL;
	if (kind == GGROUP_ARRIVAL)
		return arrival_answered(queue, file, message);
	return lever_answered(queue, file, message);
}

ssize_t ggroup_provider_write(struct ggroup_file *file, const char __user *from, size_t size)
{
	struct ggroup_queue *queue = &file->device->queue;
	struct ggroup_message message;
	size_t done = 0;
	int err = 0;

	if (!size || size % sizeof(message))
		return -EINVAL;
	while (!err && done < size) {
		if (copy_from_user(&message, from + done, sizeof(message)))
			err = -EFAULT;
		else
			err = answered(queue, file, &message);
		if (!err)
			done += sizeof(message);
		cond_resched();
	}
	return done ?: err;
}

__poll_t ggroup_provider_poll(struct ggroup_file *file, struct file *filp, poll_table *wait)
{
	struct ggroup_queue *queue = &file->device->queue;
	__poll_t mask;

	poll_wait(filp, &queue->readers, wait);
	spin_lock(&queue->lock);
	if (queue->provider != file)
		mask = EPOLLERR | EPOLLHUP;
	else if (list_empty(&queue->orders))
		mask = EPOLLOUT | EPOLLWRNORM;
	else
		mask = EPOLLIN | EPOLLRDNORM | EPOLLOUT | EPOLLWRNORM;
	spin_unlock(&queue->lock);
	return mask;
}
