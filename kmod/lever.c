// SPDX-License-Identifier: GPL-2.0
/*
 * Levers. A caller that asks for one to be moved waits in a struct on its own stack, on a list of
 * that lever. So nothing is allocated for a command, each caller gets the answer to its own
 * request, and only answered callers are woken.
 */

#include <linux/completion.h>
#include <linux/lockdep.h>
#include <linux/poll.h>

#include "device.h"
#include "group.h"
#include "lever.h"
#include "process.h"
#include "queue.h"

/**
 * struct ggroup_waiter - a caller that asked for a lever to be moved
 * @node: among the lever's @asking or @awaiting; empty once answered
 * @done: completed by the answer
 * @value: the value asked for
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

void ggroup_lever_init(struct ggroup_lever *levers)
{
	int kind;

	for (kind = 0; kind < GGROUP_LEVERS; kind++) {
		levers[kind].order.kind = kind;
		INIT_LIST_HEAD(&levers[kind].order.node);
		INIT_LIST_HEAD(&levers[kind].asking);
		INIT_LIST_HEAD(&levers[kind].awaiting);
	}
}

/*
 * Answer all waiters on a list. They must not be touched afterwards: they are on their callers'
 * stacks.
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

/* The next command of a lever. All with the lock of the queue held. */

static bool has_state(const struct ggroup_lever *lever)
{
	return lever->order.kind != GGROUP_LEVER_RECLAIM;
}

/* Return the value of the next command. */
static u64 wanted(const struct ggroup_lever *lever)
{
	if (list_empty(&lever->asking))
		return lever->settled;
	if (has_state(lever))
		return list_last_entry(&lever->asking, struct ggroup_waiter, node)->value;
	return list_first_entry(&lever->asking, struct ggroup_waiter, node)->value;
}

/*
 * Put the lever on the queue, or take it off: called after anything that may change which of these
 * is due.
 */
static void line_up(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	bool due = !lever->flight && (lever->owed || !list_empty(&lever->asking));

	lockdep_assert_held(&queue->lock);
	if (due == !list_empty(&lever->order.node))
		return;
	if (due) {
		list_add_tail(&lever->order.node, &queue->orders);
		wake_up_interruptible_poll(&queue->readers, EPOLLIN | EPOLLRDNORM);
	} else {
		list_del_init(&lever->order.node);
	}
}

/* Return whether no command is under way, and the last known value is the one asked for. */
static bool holds(const struct ggroup_lever *lever, u64 value)
{
	return has_state(lever) && !lever->flight && list_empty(&lever->order.node) &&
	       !lever->doubtful && lever->held == value;
}

static int ask(struct ggroup *group, struct ggroup_lever *lever, struct ggroup_waiter *waiter)
{
	struct ggroup_queue *queue = &group->device->queue;

	lockdep_assert_held(&queue->lock);
	/*
	 * Under the lock: ggroup_lever_forget() comes after the group is no longer alive, so no
	 * waiter is left behind on its lists.
	 */
	if (!READ_ONCE(group->alive) || !queue->online)
		return -ENODEV;
	if (ggroup_process_exited(group))
		return -ESRCH;
	if (holds(lever, waiter->value)) {
		complete(&waiter->done);
		return 0;
	}
	list_add_tail(&waiter->node, &lever->asking);
	line_up(queue, lever);
	return 0;
}

/* Asking */

int ggroup_lever_command(struct ggroup *group, enum ggroup_lever_kind kind, u64 value,
			 u32 timeout_ms, u64 *result)
{
	struct ggroup_queue *queue = &group->device->queue;
	struct ggroup_lever *lever = &group->levers[kind];
	struct ggroup_waiter waiter = { .value = value };
	unsigned long timeout;
	int err;

	if (group->kind != GGROUP_KIND_PROCESS || value > GGROUP_MAX)
		return -EINVAL;
	err = ggroup_queue_patience(timeout_ms, &timeout);
	if (err)
		return err;
	INIT_LIST_HEAD(&waiter.node);
	init_completion(&waiter.done);

	spin_lock(&queue->lock);
	err = ask(group, lever, &waiter);
	spin_unlock(&queue->lock);
	if (err)
		return err;

	err = ggroup_queue_await(&waiter.done, timeout);

	spin_lock(&queue->lock);
	if (list_empty(&waiter.node)) {
		err = waiter.status;	/* even if it came at the very last moment */
	} else {
		list_del(&waiter.node);
		line_up(queue, lever);
	}
	spin_unlock(&queue->lock);
	if (!err && result)
		*result = waiter.result;
	return err;
}

u64 ggroup_lever_reclaiming(struct ggroup *group)
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

/* Commands and answers */

void ggroup_lever_take(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	lockdep_assert_held(&queue->lock);
	lever->sent = wanted(lever);
	lever->flight = ++queue->flights;
	if (has_state(lever))
		list_splice_tail_init(&lever->asking, &lever->awaiting);
	else
		list_move(lever->asking.next, &lever->awaiting);
	list_del_init(&lever->order.node);
}

void ggroup_lever_untake(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	lockdep_assert_held(&queue->lock);
	lever->flight = 0;
	list_splice_init(&lever->awaiting, &lever->asking);
	line_up(queue, lever);
	if (!list_empty(&lever->order.node))
		list_move(&lever->order.node, &queue->orders);
}

void ggroup_lever_settle(struct ggroup_queue *queue, struct ggroup_lever *lever, int status,
			 u64 result)
{
	lockdep_assert_held(&queue->lock);
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
	/* Callers that meanwhile asked for the value that holds by now. */
	if (has_state(lever) && !status && wanted(lever) == lever->held)
		answer_all(&lever->asking, 0, 0);
	line_up(queue, lever);
}

/* Give up all commands: no provider will answer any more, or be asked. */
static void abandon(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	lockdep_assert_held(&queue->lock);
	lever->flight = 0;
	lever->owed = false;
	answer_all(&lever->awaiting, -ENODEV, 0);
	answer_all(&lever->asking, -ENODEV, 0);
	line_up(queue, lever);
}

void ggroup_lever_replay(struct ggroup_queue *queue, struct ggroup_lever *lever)
{
	lockdep_assert_held(&queue->lock);
	if (!has_state(lever) || !(lever->settled || lever->doubtful))
		return;
	lever->owed = true;
	line_up(queue, lever);
}

void ggroup_lever_bereave(struct ggroup_queue *queue, struct ggroup_lever *lever, bool released)
{
	lockdep_assert_held(&queue->lock);
	if (lever->flight && has_state(lever))
		lever->doubtful = true;
	if (released) {
		lever->held = 0;
		lever->doubtful = false;
	}
	abandon(queue, lever);
}

void ggroup_lever_forget(struct ggroup *group)
{
	struct ggroup_queue *queue = &group->device->queue;
	int kind;

	spin_lock(&queue->lock);
	for (kind = 0; kind < GGROUP_LEVERS; kind++)
		abandon(queue, &group->levers[kind]);
	spin_unlock(&queue->lock);
}
