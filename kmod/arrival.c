// SPDX-License-Identifier: GPL-2.0
/* Arrivals: each waits in a struct on its caller's stack, like the callers of levers. */

#include <linux/lockdep.h>
#include <linux/poll.h>
#include <linux/sched.h>

#include "arrival.h"
#include "device.h"

/* Return whether there is a provider to tell. */
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

int ggroup_arrival_wait(struct ggroup_device *device, u32 timeout_ms)
{
	struct ggroup_queue *queue = &device->queue;
	struct ggroup_arrival arrival = {
		.order.kind = GGROUP_ARRIVAL,
		.leader = current->group_leader,
	};
	unsigned long timeout;
	int err;

	err = ggroup_queue_patience(timeout_ms, &timeout);
	if (err)
		return err;
	init_completion(&arrival.done);
	if (!announce(queue, &arrival))
		return -ENODEV;

	err = ggroup_queue_await(&arrival.done, timeout);

	spin_lock(&queue->lock);
	if (list_empty(&arrival.order.node))
		err = arrival.status;
	else
		list_del(&arrival.order.node);
	spin_unlock(&queue->lock);
	return err;
}

struct ggroup_arrival *ggroup_arrival_find(struct ggroup_queue *queue, u64 number)
{
	struct ggroup_arrival *arrival;

	lockdep_assert_held(&queue->lock);
	list_for_each_entry(arrival, &queue->arriving, order.node)
		if (arrival->number == number)
			return arrival;
	return NULL;
}

void ggroup_arrival_answer(struct ggroup_queue *queue, struct ggroup_arrival *arrival, int status)
{
	lockdep_assert_held(&queue->lock);
	list_del_init(&arrival->order.node);
	arrival->status = status;
	complete(&arrival->done);
}
