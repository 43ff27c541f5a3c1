/* SPDX-License-Identifier: GPL-2.0 */
/* Reclaim: whom to take memory from, and the workers that have it taken. */
#ifndef GGROUP_RECLAIM_H
#define GGROUP_RECLAIM_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;
struct ggroup_device;
struct work_struct;

/*
 * Whether @over bytes could leave the GPU from @top downwards if @charged, a process below it,
 * held @nbytes more: as far as swap_max lets them. With the device's lock held for writing.
 */
bool ggroup_reclaimable(struct ggroup *top, struct ggroup *charged, u64 nbytes, u64 over);

/**
 * struct ggroup_targets - a plan
 * @target: in the order in which to take
 * @count: how many
 */
struct ggroup_targets {
	struct ggroup_target *target;
	unsigned int count;
};

/*
 * Plans to take @nbytes below @top. -ENODEV, -ENOMEM. Takes the device's lock; free with
 * ggroup_plan_free().
 */
int ggroup_plan(struct ggroup *top, u64 nbytes, struct ggroup_targets *targets);
void ggroup_plan_free(struct ggroup_targets *targets);

/* Has @nbytes taken below @top by the provider, and waits for it; *@moved is how much it was. */
int ggroup_reclaim(struct ggroup *top, u64 nbytes, u32 timeout_ms, u64 *moved);

/* The worker of a group: brings it back under its high. */
void ggroup_reclaim_work(struct work_struct *work);
/* Wakes it, if there is something for it to do. With the device's lock held. */
void ggroup_reclaim_wake(struct ggroup *group);

int ggroup_reclaim_init(void);
void ggroup_reclaim_exit(void);

#endif
