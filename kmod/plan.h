/* SPDX-License-Identifier: GPL-2.0 */
/* Plans: whom to take memory from. */
#ifndef GGROUP_PLAN_H
#define GGROUP_PLAN_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;

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

#endif
