/* SPDX-License-Identifier: GPL-2.0 */
/* The commands of one GPU that wait for its provider, and the wait for the answers. */
#ifndef GGROUP_QUEUE_H
#define GGROUP_QUEUE_H

#include <linux/list.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

struct completion;
struct ggroup_file;

enum ggroup_lever_kind {
#define GGROUP_LEVER(name, bit, field)	GGROUP_LEVER_##bit,	/* value: of the setting */
#include "settings.def"
	GGROUP_LEVER_RUNLIST,		/* value: GGROUP_RUNLIST_* */
	GGROUP_LEVER_RECLAIM,		/* value: bytes; no state: one request after the other */
	GGROUP_LEVERS
};

enum ggroup_runlist {
	GGROUP_RUNLIST_ON,		/* no TSG is off */
	GGROUP_RUNLIST_OFF,		/* the TSGs of all engines are */
	GGROUP_RUNLIST_OFF_GR,		/* the TSGs of the GR engine alone are */
};

#define GGROUP_ARRIVAL		GGROUP_LEVERS	/* order.kind of an arrival */

/**
 * struct ggroup_order - a lever's command, or an arrival, that waits for the provider to read it
 * @node: on the queue
 * @kind: a GGROUP_LEVER_*, or GGROUP_ARRIVAL
 */
struct ggroup_order {
	struct list_head node;
	u8 kind;
};

/**
 * struct ggroup_queue - the commands of one GPU
 * @lock: protects this and the levers; taken inside the device's lock, never around it
 * @online: there is a provider
 * @provider: its file, which is only compared: a read or write on a former one's file gets nothing
 * @process: the process that registered it, with a reference; NULL without a provider
 * @orders: orders to be read, oldest first, so that neither levers nor arrivals starve the other
 * @arriving: arrivals that were read and not answered
 * @arrivals: number of arrivals ever, which is the last one's number
 * @flights: number of commands ever read, which is the last one's number
 * @readers: a provider that waits for a command
 */
struct ggroup_queue {
	spinlock_t lock;	/* inside the device's lock */
	bool online;
	const struct ggroup_file *provider;
	struct pid *process;
	struct list_head orders;
	struct list_head arriving;
	u64 arrivals;
	u64 flights;
	wait_queue_head_t readers;
};

/**
 * ggroup_queue_init() - make the queue of a new device
 * @queue: the queue
 */
void ggroup_queue_init(struct ggroup_queue *queue);

/**
 * ggroup_queue_patience() - get how long to wait for an answer
 * @timeout_ms: the caller's timeout, 0 for GGROUP_TIMEOUT_MS
 * @timeout: the same in jiffies
 *
 * Return: 0, or -EINVAL for more than GGROUP_TIMEOUT_MS_MOST.
 */
int ggroup_queue_patience(u32 timeout_ms, unsigned long *timeout);

/**
 * ggroup_queue_await() - wait for an answer
 * @done: completed by the answer
 * @timeout: in jiffies
 *
 * Return: 0, -EINTR or -ETIMEDOUT; the answer may still come right after.
 */
int ggroup_queue_await(struct completion *done, unsigned long timeout);

#endif
