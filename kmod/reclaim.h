/* SPDX-License-Identifier: GPL-2.0 */
/* Reclaim: takes memory, on request or in workers that tenants' charges wake. */
#ifndef GGROUP_RECLAIM_H
#define GGROUP_RECLAIM_H

#include <linux/types.h>

struct ggroup;
struct work_struct;

/**
 * ggroup_reclaim_below() - have the provider take memory, and wait for it
 * @top: the group to take it from, or from the groups below
 * @nbytes: bytes to take
 * @timeout_ms: as in struct ggroup_command
 * @moved: bytes taken
 *
 * A process that cannot give does not stop the others: its error is returned only where none gave.
 * -ENODEV, -EINTR and -ETIMEDOUT end the call, and are returned whatever has moved by then.
 *
 * Return: 0, -ENODEV, -ENOMEM, -EINTR, -ETIMEDOUT, or the provider's answer.
 */
int ggroup_reclaim_below(struct ggroup *top, u64 nbytes, u32 timeout_ms, u64 *moved);

/**
 * ggroup_reclaim_work() - bring a group back under its high, in a worker
 * @work: its @reclaim_work, which has a reference to it
 */
void ggroup_reclaim_work(struct work_struct *work);

/**
 * ggroup_reclaim_wake() - wake the workers at and above a group that have something to do
 * @group: the group
 *
 * Context: the device's lock is held.
 */
void ggroup_reclaim_wake(struct ggroup *group);

/**
 * ggroup_reclaim_init() - set up, as the module is loaded
 *
 * Return: 0 or -ENOMEM.
 */
int ggroup_reclaim_init(void);

/**
 * ggroup_reclaim_exit() - tear down, as the module is unloaded
 */
void ggroup_reclaim_exit(void);

#endif
