/* SPDX-License-Identifier: GPL-2.0 */
/* A process that joins, and waits for the provider to make it a group. */
#ifndef GGROUP_ARRIVAL_H
#define GGROUP_ARRIVAL_H

#include <linux/completion.h>
#include <linux/types.h>

#include "provider.h"

struct ggroup_device;
struct task_struct;

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

/*
 * Has a group made for the caller's process, and waits for it. No lock may be held that the
 * provider needs.
 */
int ggroup_arrive(struct ggroup_device *device, u32 timeout_ms);

/*
 * The one of that number that was read, NULL for none. This and what follows: with the lock of the
 * queue held.
 */
struct ggroup_arrival *ggroup_arrival_find(struct ggroup_queue *queue, u64 number);
/* Afterwards it must not be touched: it is on its owner's stack. */
void ggroup_arrival_answer(struct ggroup_arrival *arrival, int status);

#endif
