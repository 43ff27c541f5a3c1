/* SPDX-License-Identifier: GPL-2.0 */
/* Plans: which processes to take memory from, and how much. */
#ifndef GGROUP_PLAN_H
#define GGROUP_PLAN_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;

/**
 * ggroup_plan_reclaimable() - check whether bytes could leave the GPU, as far as swap_max allows
 * @top: the group that is over its high
 * @charged: a process at or below @top
 * @nbytes: bytes that it would hold in addition
 * @over: bytes that have to leave from @top downwards
 *
 * Context: the device's lock is held for writing.
 * Return: true if they could.
 */
bool ggroup_plan_reclaimable(struct ggroup *top, struct ggroup *charged, u64 nbytes, u64 over);

/**
 * ggroup_plan_foresee() - note how soon processes use their memory again
 * @root: the root of their GPU
 * @uses: the next use of each, as the ABI has it
 * @count: number of @uses
 *
 * Context: the device's lock is held for writing.
 * Return: 0, or -EINVAL where one is invalid, and then nothing is noted.
 */
int ggroup_plan_foresee(struct ggroup *root, const struct ggroup_use *uses, unsigned int count);

/**
 * struct ggroup_targets - a plan
 * @target: targets, in the order in which to take from them
 * @count: number of targets
 */
struct ggroup_targets {
	struct ggroup_target *target;
	unsigned int count;
};

/**
 * ggroup_plan_make() - plan to take memory
 * @top: the group to take it from, or from the groups below
 * @nbytes: bytes to take
 * @targets: the plan, to be freed with ggroup_plan_free()
 *
 * Context: takes the device's lock.
 * Return: 0, -ENODEV or -ENOMEM.
 */
int ggroup_plan_make(struct ggroup *top, u64 nbytes, struct ggroup_targets *targets);

/**
 * ggroup_plan_free() - free a plan
 * @targets: the plan, or what an error left of it
 */
void ggroup_plan_free(struct ggroup_targets *targets);

#endif
