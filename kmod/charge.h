/* SPDX-License-Identifier: GPL-2.0 */
/* Charging: figures that are added up the tree, by many CPUs at once. */
#ifndef GGROUP_CHARGE_H
#define GGROUP_CHARGE_H

#include <linux/types.h>

struct ggroup;

/**
 * ggroup_charge_add() - charge bytes to a process and every group above it
 * @group: the group of the process
 * @nbytes: how much
 * @tenant: the program says it of itself: so it is bounded, and the workers are woken, since no
 *	daemon reclaims afterwards; and where a limit_max leaves no room, memory is reclaimed
 *	before, and waited for
 *
 * Context: takes the device's lock; the same holds for all below but ggroup_charge_shift().
 * Return: 0; -ENODEV for a group that has left the tree, -EINVAL for one that is no process or for
 * more than GGROUP_MAX, which all below have too; -ENOMEM. Over a limit_max -EINTR of a @tenant,
 * and -EAGAIN of others where so much could leave before.
 */
int ggroup_charge_add(struct ggroup *group, u64 nbytes, bool tenant);

/**
 * ggroup_charge_sub() - take bytes off a process and every group above it
 * @group: the group of the process
 * @nbytes: how much
 *
 * Return: 0, -ENODEV, or -EINVAL also for more than it holds.
 */
int ggroup_charge_sub(struct ggroup *group, u64 nbytes);

/**
 * ggroup_charge_sub_swap() - take swapped bytes off a process and every group above it
 * @group: the group of the process
 * @nbytes: how much
 *
 * Return: 0, -ENODEV, or -EINVAL also for more than it has there.
 */
int ggroup_charge_sub_swap(struct ggroup *group, u64 nbytes);

/**
 * ggroup_charge_swap_out() - book bytes that were moved to the host
 * @group: the group of the process
 * @nbytes: how much
 * @usec: what it took
 * @tenant: the program says it of itself: so the statistics are bounded
 *
 * Return: 0, -ENODEV, -EINVAL also for more than it holds, -ENOSPC over some swap_max.
 */
int ggroup_charge_swap_out(struct ggroup *group, u64 nbytes, u64 usec, bool tenant);

/**
 * ggroup_charge_swap_in() - book bytes that are moved to the GPU
 * @group: the group of the process
 * @nbytes: how much
 * @usec: what it took
 * @tenant: the program says it of itself: so the statistics are bounded
 *
 * Return: 0, -ENODEV, -EINVAL also for more than it has there, -EAGAIN over some high.
 */
int ggroup_charge_swap_in(struct ggroup *group, u64 nbytes, u64 usec, bool tenant);

/**
 * ggroup_charge_observe() - have the books of a process follow the driver's figure
 * @group: the group of the process
 * @nbytes: what it holds
 *
 * Return: 0, -ENODEV, or -EINVAL also where a level would hold more than GGROUP_MAX.
 */
int ggroup_charge_observe(struct ggroup *group, u64 nbytes);

/**
 * ggroup_charge_shift() - add to the figures of a group and of every one above it
 * @group: the group
 * @held: bytes on the GPU, which no figure stands against: the caller has looked
 * @swapped: bytes in the host, the same
 *
 * Context: the device's lock is held for writing, or for reading with its figures.
 */
void ggroup_charge_shift(struct ggroup *group, s64 held, s64 swapped);

#endif
