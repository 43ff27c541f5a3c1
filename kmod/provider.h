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

struct ggroup;
struct ggroup_device;
struct ggroup_file;

enum ggroup_lever_kind {
	GGROUP_LEVER_TIMESLICE,		/* value: microseconds */
	GGROUP_LEVER_RUNLIST,		/* value: 1 detached, 0 attached */
	GGROUP_LEVER_RECLAIM,		/* value: bytes; no state, one after the other */
	GGROUP_LEVERS
};

/**
 * struct ggroup_order - what waits for the provider to read it: the command to a lever, or an
 * arrival
 * @node: on the queue
 * @kind: a GGROUP_LEVER_*, or GGROUP_LEVERS for an arrival
 */
struct ggroup_order {
	struct list_head node;
	u8 kind;
};

/**
 * struct ggroup_lever - one lever of one process. All under the lock of the device's queue
 * @order: on the queue while there is something to command, and no command in flight
 * @asking: whoever asked for what was not read yet, in the order in which they did
 * @awaiting: whoever asked for what is in flight
 * @held: what holds now: acknowledged, and not said to be released since
 * @settled: last acknowledged, by any provider: what the next one is told
 * @sent: what the command in flight says
 * @flight: number of the command in flight, which was read and not answered; 0 for none
 * @owed: this provider has not been told @settled yet
 * @doubtful: it was told to move, and failed, or the provider went without an answer
 *
 * What is commanded is what the last one asking asked for (RECLAIM: the first, and for himself
 * alone), so a command that was not read yet is replaced by a later one, and is there again if that
 * is given up. A command that failed, or that nobody waits for any more before it was read, leaves
 * no trace: who asked was told, and a process must not be frozen by it later. One in flight cannot
 * be taken back, so its answer counts even when it comes too late for who asked.
 */
struct ggroup_lever {
	struct ggroup_order order;
	struct list_head asking;
	struct list_head awaiting;
	u64 held;
	u64 settled;
	u64 sent;
	u64 flight;
	bool owed;
	bool doubtful;
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
void ggroup_levers_init(struct ggroup_lever *levers);

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

/*
 * Has a lever of a process moved, and waits for the answer. No lock may be held. See the ABI for
 * errors; -ESRCH for a process that exited. @result is only written on success, and may be NULL.
 */
int ggroup_command(struct ggroup *group, enum ggroup_lever_kind kind, u64 value, u32 timeout_ms,
		   u64 *result);
/*
 * Has a group made for the caller's process, and waits for it. No lock may be held that the
 * provider needs.
 */
int ggroup_arrive(struct ggroup_device *device, u32 timeout_ms);
/*
 * The group left the tree (it is not alive any more): its commands are no more, and who waits for
 * them gets -ENODEV.
 */
void ggroup_levers_forget(struct ggroup *group);
/* Bytes that reclaims in progress are about to take from a process; at most GGROUP_MAX. */
u64 ggroup_reclaiming(struct ggroup *group);

/* The operations of a file that registered, now or before. */
ssize_t ggroup_provider_read(struct ggroup_file *file, char __user *to, size_t size, bool nonblock);
ssize_t ggroup_provider_write(struct ggroup_file *file, const char __user *from, size_t size);
__poll_t ggroup_provider_poll(struct ggroup_file *file, struct file *filp, poll_table *wait);

#endif
