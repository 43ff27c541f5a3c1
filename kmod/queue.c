// SPDX-License-Identifier: GPL-2.0
/* The queue of commands of a GPU, and the wait for answers. */

#include <linux/completion.h>
#include <linux/jiffies.h>

#include "queue.h"
#include "uapi/ggroup.h"

void ggroup_queue_init(struct ggroup_queue *queue)
{
	spin_lock_init(&queue->lock);
	INIT_LIST_HEAD(&queue->orders);
	INIT_LIST_HEAD(&queue->arriving);
	init_waitqueue_head(&queue->readers);
}

int ggroup_queue_patience(u32 timeout_ms, unsigned long *timeout)
{
	if (timeout_ms > GGROUP_TIMEOUT_MS_MOST)
		return -EINVAL;
	*timeout = msecs_to_jiffies(timeout_ms ?: GGROUP_TIMEOUT_MS);
	return 0;
}

/*
 * Not -ERESTARTSYS: the request may be done already, so only the caller knows whether to repeat it.
 */
int ggroup_queue_await(struct completion *done, unsigned long timeout)
{
	long left = wait_for_completion_interruptible_timeout(done, timeout);

	if (left < 0)
		return -EINTR;
	return left ? 0 : -ETIMEDOUT;
}
