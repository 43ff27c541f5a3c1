// SPDX-License-Identifier: GPL-2.0
/*
 * Whoever asks for something waits in a struct on his own stack, on a list of the lever that he
 * wants moved. So nothing is allocated for a command, everybody gets the answer to what he asked
 * for, and only who is answered is woken.
 */

#include <linux/completion.h>
#include <linux/err.h>
#include <linux/jiffies.h>
#include <linux/pid.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#include <linux/uaccess.h>

#include "control.h"
#include "device.h"
#include "exit.h"
#include "group.h"
#include "provider.h"
#include "trace.h"

#define GGROUP_ARRIVAL		GGROUP_LEVERS	/* what order.kind says of an arrival */

/* The seq of a message: a group's id or an arrival's number, and the kind. */
#define GGROUP_SEQ_SHIFT	2
#define GGROUP_SEQ_KIND		((1U << GGROUP_SEQ_SHIFT) - 1)

static_assert(GGROUP_ARRIVAL <= GGROUP_SEQ_KIND);

/**
 * struct ggroup_waiter - one who asked for a lever to be moved
 * @node: among the lever's @asking or @awaiting; empty once answered
 * @done: answered
 * @value: asked for
 * @status: of the answer
 * @result: of the answer
 */
struct ggroup_waiter {
	struct list_head node;
	struct completion done;
	u64 value;
	int status;
	u64 result;
};

/**
 * struct ggroup_arrival - one who waits for his process to be made a group
 * @order: among the queue's @orders or @arriving; its node is empty once answered
 * @done: answered
 * @number: its name, never used again
 * @leader: who: the first thread, which is not released while another one is in here
 * @status: of the answer
 */
struct ggroup_arrival {
	struct ggroup_order order;
	struct completion done;
	u64 number;
	struct task_struct *leader;
	int status;
};

/**
 * struct ggroup_taken - what a provider is about to get
 * @message: what it reads
 * @flight: of a lever, the number of the command
 */
struct ggroup_taken {
	struct ggroup_message message;
	u64 flight;
};

void ggroup_queue_init(struct ggroup_queue *queue)
{
	spin_lock_init(&queue->lock);
	INIT_LIST_HEAD(&queue->orders);
	INIT_LIST_HEAD(&queue->arriving);
	init_waitqueue_head(&queue->readers);
}

void ggroup_levers_init(struct ggroup_lever *levers)
{
	int kind;

	for (kind = 0; kind < GGROUP_LEVERS; kind++) {
		levers[kind].order.kind = kind;
		INIT_LIST_HEAD(&levers[kind].order.node);
		INIT_LIST_HEAD(&levers[kind].asking);
		INIT_LIST_HEAD(&levers[kind].awaiting);
	}
}

/* Waiting */

static int patience(u32 timeout_ms, unsigned long *timeout)
{
	if (timeout_ms > GGROUP_TIMEOUT_MS_MOST)
		return -EINVAL;
	*timeout = msecs_to_jiffies(timeout_ms ?: GGROUP_TIMEOUT_MS);
	return 0;
}

/*
 * Not -ERESTARTSYS: what was asked for may be done already, so only the caller knows whether to ask
 * again.
 */
static int await(struct completion *done, unsigned long timeout)
{
	long left = wait_for_completion_interruptible_timeout(done, timeout);

	if (left < 0)
		return -EINTR;
	return left ? 0 : -ETIMEDOUT;
}

/*
 * Everybody on the list is answered. Afterwards the waiters must not be touched: they are on their
 * owners' stacks.
 */
static void answer_all(struct list_head *waiters, int status, u64 result)
{
	struct ggroup_waiter *waiter, *next;

	list_for_each_entry_safe(waiter, next, waiters, node) {
		list_del_init(&waiter->node);
		waiter->status = status;
		waiter->result = result;
		complete(&waiter->done);
	}
}

static void answer_arrival(struct ggroup_arrival *arrival, int status)
{
	list_del_init(&arrival->order.node);
	arrival->status = status;
	complete(&arrival->done);
}

/* Levers. All with the lock of the queue held. */

static bool has_state(const struct ggroup_lever *lever)
{
	return lever->order.kind != GGROUP_LEVER_RECLAIM;
}

static struct ggroup *group_of(struct ggroup_lever *lever)
{
	return container_of(lever - lever->order.kind, struct ggroup, levers[0]);
}

/* What the next command is to say. */
static u64 wanted(const struct ggroup_lever *lever)
{
	if (list_empty(&lever->asking))
		return lever->settled;
	if (has_state(lever))
		return list_last_entry(&lever->asking, struct ggroup_waiter, node)->value;
	return list_first_entry(&lever->asking, struct ggroup_waiter, node)->value;
}

/*
 * Puts the lever on the queue, or takes it off: to be called after whatever may change the one or
 * the other.
 */
static void line_up(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	bool due = !lever->flight && (lever->owed || !list_empty(&lever->asking));

	if (due == !list_empty(&lever->order.node))
		return;
	if (due) {
		list_add_tail(&lever->order.node, &queue->orders);
		wake_up_interruptible_poll(&queue->readers, EPOLLIN | EPOLLRDNORM);
	} else {
		list_del_init(&lever->order.node);
	}
}

/* Nothing is under way, and the last that is known is what is asked for. */
static bool holds(const struct ggroup_lever *lever, u64 value)
{
	return has_state(lever) && !lever->flight && list_empty(&lever->order.node) &&
	       !lever->doubtful && lever->held == value;
}

static int ask(struct ggroup *group, struct ggroup_lever *lever, struct ggroup_waiter *waiter)
{
	struct ggroup_queue *queue = &group->device->queue;

	/*
	 * Under the lock: ggroup_levers_forget() comes after it is not alive, so nobody is left
	 * behind on its lists.
	 */
	if (!READ_ONCE(group->alive) || !queue->online)
		return -ENODEV;
	if (ggroup_exited(group))
		return -ESRCH;
	if (holds(lever, waiter->value)) {
		complete(&waiter->done);
		return 0;
	}
	list_add_tail(&waiter->node, &lever->asking);
	line_up(queue, lever);
	return 0;
}

int ggroup_command(struct ggroup *group, enum ggroup_lever_kind kind, u64 value, u32 timeout_ms,
		   u64 *result)
{
	struct ggroup_queue *queue = &group->device->queue;
	struct ggroup_lever *lever = &group->levers[kind];
	struct ggroup_waiter waiter = { .value = value };
	unsigned long timeout;
	int err;

	if (group->kind != GGROUP_KIND_PROCESS || value > GGROUP_MAX)
		return -EINVAL;
	err = patience(timeout_ms, &timeout);
	if (err)
		return err;
	INIT_LIST_HEAD(&waiter.node);
	init_completion(&waiter.done);

	spin_lock(&queue->lock);
	err = ask(group, lever, &waiter);
	spin_unlock(&queue->lock);
	if (err)
		return err;

	err = await(&waiter.done, timeout);

	spin_lock(&queue->lock);
	if (list_empty(&waiter.node)) {
		err = waiter.status;	/* even if it came in the very last moment */
	} else {
		list_del(&waiter.node);
		line_up(queue, lever);
	}
	spin_unlock(&queue->lock);
	if (!err && result)
		*result = waiter.result;
	return err;
}

/* The lever's command was answered. */
static void settle(struct ggroup_queue *queue, struct ggroup_lever *lever, int status, u64 result)
{
	lever->flight = 0;
	lever->owed = false;
	if (has_state(lever)) {
		lever->doubtful = status;
		if (!status) {
			lever->held = lever->sent;
			lever->settled = lever->sent;
		}
	}
	answer_all(&lever->awaiting, status, result);
	/* Who asked meanwhile for what holds by now. */
	if (has_state(lever) && !status && wanted(lever) == lever->held)
		answer_all(&lever->asking, 0, 0);
	line_up(queue, lever);
}

/* Nobody is going to answer any more, nor to be asked. */
static void abandon(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	lever->flight = 0;
	lever->owed = false;
	answer_all(&lever->awaiting, -ENODEV, 0);
	answer_all(&lever->asking, -ENODEV, 0);
	line_up(queue, lever);
}

void ggroup_levers_forget(struct ggroup *group)
{
	struct ggroup_queue *queue = &group->device->queue;
	int kind;

	spin_lock(&queue->lock);
	for (kind = 0; kind < GGROUP_LEVERS; kind++)
		abandon(queue, &group->levers[kind]);
	spin_unlock(&queue->lock);
}

u64 ggroup_reclaiming(struct ggroup *group)
{
	struct ggroup_lever *lever = &group->levers[GGROUP_LEVER_RECLAIM];
	struct ggroup_queue *queue = &group->device->queue;
	struct ggroup_waiter *waiter;
	u64 nbytes;

	spin_lock(&queue->lock);
	nbytes = lever->flight ? lever->sent : 0;
	list_for_each_entry(waiter, &lever->asking, node)
		nbytes = min_t(u64, nbytes + waiter->value, GGROUP_MAX);
	spin_unlock(&queue->lock);
	return nbytes;
}

/* Arrivals */

/* Whether there was a provider to be told. */
static bool announce(struct ggroup_queue *queue, struct ggroup_arrival *arrival)
{
	bool online;

	spin_lock(&queue->lock);
	online = queue->online;
	if (online) {
		arrival->number = ++queue->arrivals;
		list_add_tail(&arrival->order.node, &queue->orders);
		wake_up_interruptible_poll(&queue->readers, EPOLLIN | EPOLLRDNORM);
	}
	spin_unlock(&queue->lock);
	return online;
}

int ggroup_arrive(struct ggroup_device *device, u32 timeout_ms)
{
	struct ggroup_queue *queue = &device->queue;
	struct ggroup_arrival arrival = {
		.order.kind = GGROUP_ARRIVAL,
		.leader = current->group_leader,
	};
	unsigned long timeout;
	int err;

	err = patience(timeout_ms, &timeout);
	if (err)
		return err;
	init_completion(&arrival.done);
	if (!announce(queue, &arrival))
		return -ENODEV;

	err = await(&arrival.done, timeout);

	spin_lock(&queue->lock);
	if (list_empty(&arrival.order.node))
		err = arrival.status;
	else
		list_del(&arrival.order.node);
	spin_unlock(&queue->lock);
	return err;
}

static struct ggroup_arrival *find_arriving(struct ggroup_queue *queue, u64 number)
{
	struct ggroup_arrival *arrival;

	list_for_each_entry(arrival, &queue->arriving, order.node)
		if (arrival->number == number)
			return arrival;
	return NULL;
}

/* The coming and going of a provider */

/* A new provider knows nothing of what the former ones were told. */
static void replay(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	if (!has_state(lever) || !(lever->settled || lever->doubtful))
		return;
	lever->owed = true;
	line_up(queue, lever);
}

bool ggroup_provider_come(struct ggroup_device *device, const struct ggroup_file *file)
{
	struct ggroup_queue *queue = &device->queue;
	struct ggroup *group;
	int bucket, kind;

	if (queue->online)
		return false;
	/*
	 * Before it is online: nobody may be told that a lever holds which the provider was not
	 * told of.
	 */
	hash_for_each(device->processes, bucket, group, name) {
		spin_lock(&queue->lock);
		for (kind = 0; kind < GGROUP_LEVERS && !group->dead; kind++)
			replay(queue, &group->levers[kind]);
		spin_unlock(&queue->lock);
	}
	spin_lock(&queue->lock);
	queue->provider = file;
	queue->process = get_pid(task_tgid(current));
	queue->online = true;
	spin_unlock(&queue->lock);
	return true;
}

static void bereave(struct ggroup_queue *queue, struct ggroup_lever *lever, bool released)
{
	if (lever->flight && has_state(lever))
		lever->doubtful = true;
	if (released) {
		lever->held = 0;
		lever->doubtful = false;
	}
	abandon(queue, lever);
}

void ggroup_provider_go(struct ggroup_device *device, bool released)
{
	struct ggroup_queue *queue = &device->queue;
	struct ggroup_order *order, *next;
	struct ggroup *group;
	int bucket, kind;

	spin_lock(&queue->lock);
	queue->online = false;
	queue->provider = NULL;
	put_pid(queue->process);
	queue->process = NULL;
	spin_unlock(&queue->lock);
	/*
	 * Now nothing is added. One group at a time, so that nobody spins for as long as it takes
	 * for all of them.
	 */
	hash_for_each(device->processes, bucket, group, name) {
		spin_lock(&queue->lock);
		for (kind = 0; kind < GGROUP_LEVERS; kind++)
			bereave(queue, &group->levers[kind], released);
		spin_unlock(&queue->lock);
	}
	/* Arrivals are what is left. */
	spin_lock(&queue->lock);
	list_splice_init(&queue->arriving, &queue->orders);
	list_for_each_entry_safe(order, next, &queue->orders, node)
		answer_arrival(container_of(order, struct ggroup_arrival, order), -ENODEV);
	spin_unlock(&queue->lock);
	wake_up_interruptible_poll(&queue->readers, EPOLLERR | EPOLLHUP);
}

/* What it reads */

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
	case GGROUP_LEVER_TIMESLICE:
		return GGROUP_OP_SET_TIMESLICE;
	case GGROUP_LEVER_RUNLIST:
		return lever->sent ? GGROUP_OP_DETACH_TSG : GGROUP_OP_ATTACH_TSG;
	default:
		return GGROUP_OP_RECLAIM;
	}
}

static void take_lever(struct ggroup_queue *queue, struct ggroup_lever *lever,
		       struct ggroup_taken *taken)
{
	struct ggroup *group = group_of(lever);
	unsigned int kind = lever->order.kind;

	lever->sent = wanted(lever);
	lever->flight = ++queue->flights;
	taken->flight = lever->flight;
	if (has_state(lever))
		list_splice_tail_init(&lever->asking, &lever->awaiting);
	else
		list_move(lever->asking.next, &lever->awaiting);
	list_del_init(&lever->order.node);
	write_message(&taken->message, op_of(lever), group->id << GGROUP_SEQ_SHIFT | kind,
		      group->id, group->pid, group->start);
	if (kind != GGROUP_LEVER_RUNLIST)
		taken->message.args[3] = lever->sent;
}

static void take_arrival(struct ggroup_queue *queue, struct ggroup_arrival *arrival,
			 struct ggroup_taken *taken)
{
	list_move_tail(&arrival->order.node, &queue->arriving);
	/* The start too is as the reader sees it, who may live in another time namespace. */
	write_message(&taken->message, GGROUP_OP_ARRIVE,
		      arrival->number << GGROUP_SEQ_SHIFT | GGROUP_ARRIVAL, 0,
		      task_tgid(arrival->leader), ggroup_start_of(arrival->leader));
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

/* It was told nothing: the command is the next one again, unless it was given up meanwhile. */
static void untake_lever(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	lever->flight = 0;
	list_splice_init(&lever->awaiting, &lever->asking);
	line_up(queue, lever);
	if (!list_empty(&lever->order.node))
		list_move(&lever->order.node, &queue->orders);
}

static void untake(struct ggroup_queue *queue, const struct ggroup_taken *taken)
{
	u64 number = taken->message.seq >> GGROUP_SEQ_SHIFT;
	unsigned int kind = taken->message.seq & GGROUP_SEQ_KIND;
	struct ggroup_arrival *arrival;
	struct ggroup *group = NULL;

	if (kind != GGROUP_ARRIVAL) {
		group = ggroup_find(number);
		if (!group)
			return;
	}
	spin_lock(&queue->lock);
	if (group) {
		/* Not if the provider went meanwhile, and the next one was told. */
		if (group->levers[kind].flight == taken->flight)
			untake_lever(queue, &group->levers[kind]);
	} else {
		arrival = find_arriving(queue, number);
		if (arrival)
			list_move(&arrival->order.node, &queue->orders);
	}
	wake_up_interruptible_poll(&queue->readers, EPOLLIN | EPOLLRDNORM);
	spin_unlock(&queue->lock);
	if (group)
		ggroup_put(group);
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

/* What it writes */

static int lever_answered(struct ggroup_queue *queue, const struct ggroup_file *file,
			  const struct ggroup_message *message)
{
	struct ggroup *group = ggroup_find(message->seq >> GGROUP_SEQ_SHIFT);
	u32 op = message->op & ~GGROUP_MESSAGE_REPLY;
	struct ggroup_lever *lever;
	int err = -EINVAL;
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
			settle(queue, lever, message->status, message->args[0]);
			err = 0;
		}
		spin_unlock(&queue->lock);
	}
	if (!err)
		trace_ggroup_tsg(group->id, op, value, message->status);
	ggroup_put(group);
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
	arrival = find_arriving(queue, message->seq >> GGROUP_SEQ_SHIFT);
	if (queue->provider != file)
		err = -ENODEV;
	else if (!arrival)
		err = -EINVAL;
	else
		answer_arrival(arrival, message->status);
	spin_unlock(&queue->lock);
	return err;
}

static int answered(struct ggroup_queue *queue, const struct ggroup_file *file,
		    const struct ggroup_message *message)
{
	if (!(message->op & GGROUP_MESSAGE_REPLY) || message->gpu || message->flags ||
	    message->status > 0 || message->status < -MAX_ERRNO)
		return -EINVAL;
	if ((message->seq & GGROUP_SEQ_KIND) == GGROUP_ARRIVAL)
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
