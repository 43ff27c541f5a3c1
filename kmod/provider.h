/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Who moves the hardware: a program that reads commands and writes answers, as ublk's and FUSE's
 * servers do.
 */
#ifndef GGROUP_PROVIDER_H
#define GGROUP_PROVIDER_H

#include <linux/fs.h>
#include <linux/list.h>
#include <linux/poll.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

struct completion;
struct ggroup_device;
struct ggroup_file;

enum ggroup_lever_kind {
	GGROUP_LEVER_TIMESLICE,		/* value: microseconds */
	GGROUP_LEVER_RUNLIST,		/* value: 1 detached, 0 attached */
	GGROUP_LEVER_RECLAIM,		/* value: bytes; no state, one after the other */
	GGROUP_LEVERS
};

#define GGROUP_ARRIVAL		GGROUP_LEVERS	/* what order.kind says of an arrival */

/**
 * struct ggroup_order - what waits for the provider to read it: the command to a lever, or an
 * arrival
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
 * @provider: its file, which is only compared: whoever still reads or writes on a former
 *	one's must get nothing
 * @process: who registered it, with a reference; NULL without a provider
 * @orders: what waits to be read, oldest first, so neither levers nor arrivals starve the
 *	other
 * @arriving: arrivals that were read and not answered
 * @arrivals: how many there ever were: the last one's number
 * @flights: how many commands were ever read: the last one's number
 * @readers: a provider that waits for a command
 */
struct ggroup_queue {
	spinlock_t lock;	/* inside the device's */
	bool online;
	const struct ggroup_file *provider;
	struct pid *process;
	struct list_head orders;
	struct list_head arriving;
	u64 arrivals;
	u64 flights;
	wait_queue_head_t readers;
};

void ggroup_queue_init(struct ggroup_queue *queue);

/* How long to wait for an answer, in jiffies. -EINVAL for more than GGROUP_TIMEOUT_MS_MOST. */
int ggroup_patience(u32 timeout_ms, unsigned long *timeout);
/* Waits for an answer. -EINTR, -ETIMEDOUT; it may come in the moment after. */
int ggroup_await(struct completion *done, unsigned long timeout);

/*
 * A provider registers on @file: false where there is one. Then every lever that is not as it was
 * born, or in doubt, is commanded again. With the device's lock held for writing.
 */
bool ggroup_provider_come(struct ggroup_device *device, const struct ggroup_file *file);
/*
 * It goes: who waits gets -ENODEV, what it had not answered is in doubt; where it @released
 * everything, nothing is held and nothing is in doubt. With the device's lock held for writing.
 */
void ggroup_provider_go(struct ggroup_device *device, bool released);

/* The operations of a file that registered, now or before. */
ssize_t ggroup_provider_read(struct ggroup_file *file, char __user *to, size_t size, bool nonblock);
ssize_t ggroup_provider_write(struct ggroup_file *file, const char __user *from, size_t size);
__poll_t ggroup_provider_poll(struct ggroup_file *file, struct file *filp, poll_table *wait);

#endif
