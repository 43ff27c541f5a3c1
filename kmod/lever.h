/* SPDX-License-Identifier: GPL-2.0 */
/* The levers of a process, and the callers that wait for them. */
#ifndef GGROUP_LEVER_H
#define GGROUP_LEVER_H

#include <linux/list.h>
#include <linux/types.h>

#include "queue.h"

struct ggroup;

/**
 * struct ggroup_lever - one lever of one process. All under the lock of the device's queue
 * @order: on the queue while there is something to command, and no command in flight
 * @asking: callers whose request was not read yet, in the order in which they came
 * @awaiting: callers whose request is in flight
 * @held: value that holds now: acknowledged, and not released since
 * @settled: value last acknowledged, by any provider, which the next provider is told
 * @sent: value of the command in flight
 * @flight: number of the command in flight, which was read and not answered; 0 for none
 * @owed: this provider has not been told @settled yet
 * @doubtful: a command failed, or the provider went without an answer
 *
 * The command is the last caller's request (RECLAIM: the first caller's, and for that caller
 * alone). So a command that was not read yet is replaced by a later one, and comes back if the
 * later one is given up. A command that failed, or whose callers all gave up before it was read,
 * leaves no trace: they were told, and the process must not be frozen by it later. One in flight
 * cannot be taken back, so its answer counts even when it comes too late for its caller.
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
 * ggroup_lever_init() - make the levers of a new group
 * @levers: GGROUP_LEVERS of them
 */
void ggroup_lever_init(struct ggroup_lever *levers);

/**
 * ggroup_lever_command() - have a lever of a process moved, and wait for the answer
 * @group: the group of the process
 * @kind: the lever
 * @value: the value to move it to
 * @timeout_ms: as in struct ggroup_command
 * @result: of the answer; only written on success, and may be NULL
 *
 * Context: no lock is held.
 * Return: 0, -EINVAL, -ENODEV, -ETIMEDOUT, -EINTR, -ESRCH for a process that exited, or the
 * provider's answer.
 */
int ggroup_lever_command(struct ggroup *group, enum ggroup_lever_kind kind, u64 value,
			 u32 timeout_ms, u64 *result);

/**
 * ggroup_lever_reclaiming() - get the bytes that reclaims in progress are about to take
 * @group: the group of a process
 *
 * Return: bytes, at most GGROUP_MAX.
 */
u64 ggroup_lever_reclaiming(struct ggroup *group);

/**
 * ggroup_lever_forget() - give up the commands of a group that left the tree
 * @group: a group that is not alive any more; its waiters get -ENODEV
 */
void ggroup_lever_forget(struct ggroup *group);

/**
 * ggroup_lever_take() - have the provider read the command of a lever, which is then in flight
 * @queue: the queue, with its lock held
 * @lever: a lever on the queue; the command is in its @sent
 */
void ggroup_lever_take(struct ggroup_queue *queue, struct ggroup_lever *lever);

/**
 * ggroup_lever_untake() - undo ggroup_lever_take(), as the provider was told nothing
 * @queue: the queue, with its lock held
 * @lever: the lever, whose command is the next one again, unless it was given up meanwhile
 */
void ggroup_lever_untake(struct ggroup_queue *queue, struct ggroup_lever *lever);

/**
 * ggroup_lever_settle() - take the provider's answer to the command in flight
 * @queue: the queue, with its lock held
 * @lever: the lever
 * @status: 0 or a negated errno
 * @result: for the caller
 */
void ggroup_lever_settle(struct ggroup_queue *queue, struct ggroup_lever *lever, int status,
			 u64 result);

/**
 * ggroup_lever_replay() - repeat what former providers were told, as a new one knows nothing
 * @queue: the queue, with its lock held
 * @lever: the lever
 */
void ggroup_lever_replay(struct ggroup_queue *queue, struct ggroup_lever *lever);

/**
 * ggroup_lever_bereave() - note that a lever lost its provider; see ggroup_provider_go()
 * @queue: the queue, with its lock held
 * @lever: the lever
 * @released: the provider gave everything back
 */
void ggroup_lever_bereave(struct ggroup_queue *queue, struct ggroup_lever *lever, bool released);

#endif
