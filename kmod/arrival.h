/* SPDX-License-Identifier: GPL-2.0 */
/* A process that joins, and waits for the provider to make a group for it. */
#ifndef GGROUP_ARRIVAL_H
#define GGROUP_ARRIVAL_H

#include <linux/completion.h>
#include <linux/types.h>

#include "queue.h"

struct ggroup_device;
struct task_struct;

/**
 * struct ggroup_arrival - a process that waits for its group to be made
 * @order: among the queue's @orders or @arriving; its node is empty once answered
 * @done: completed by the answer
 * @number: its name, never used again
 * @leader: its first thread, which is not released while another one is in here
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
 * ggroup_arrival_wait() - have a group made for the calling process
 * @device: the GPU
 * @timeout_ms: as in struct ggroup_command
 *
 * Context: no lock is held that the provider needs.
 * Return: 0, -ENODEV, -EINVAL, -EINTR, -ETIMEDOUT, or the provider's answer.
 */
int ggroup_arrival_wait(struct ggroup_device *device, u32 timeout_ms);

/**
 * ggroup_arrival_find() - look up an arrival that was read
 * @queue: the queue, with its lock held
 * @number: its number
 *
 * Return: the arrival; NULL for none.
 */
struct ggroup_arrival *ggroup_arrival_find(struct ggroup_queue *queue, u64 number);

/**
 * ggroup_arrival_answer() - answer an arrival
 * @queue: the queue, with its lock held
 * @arrival: the arrival, which must not be touched afterwards: it is on its caller's stack
 * @status: 0 or a negated errno
 */
void ggroup_arrival_answer(struct ggroup_queue *queue, struct ggroup_arrival *arrival, int status);

#endif
