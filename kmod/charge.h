/* SPDX-License-Identifier: GPL-2.0 */
/* Charging: figures that are added up along the tree, by many CPUs at once. */
#ifndef GGROUP_CHARGE_H
#define GGROUP_CHARGE_H

#include <linux/types.h>

struct ggroup;

/**
 * ggroup_charge_add() - charge bytes to a process and every group above it
 * @group: the group of the process
 * @nbytes: bytes to charge
 * @tenant: the charge is self-reported: it is bounded, and the workers are woken, since no daemon
 *	reclaims afterwards; where a limit_max leaves no room, memory is reclaimed first, and waited
 *	for
 *
 * Context: takes the device's lock; the same holds for all below except ggroup_charge_shift().
 * Return: 0, or -ENOMEM; -ENODEV for a group that has left the tree and -EINVAL for a group that is
 * no process or for more than GGROUP_MAX, as from all below. Over a limit_max, -EINTR for a
 * @tenant, and -EAGAIN for other callers where enough memory could leave first.
 */
int ggroup_charge_add(struct ggroup *group, u64 nbytes, bool tenant);

/**
 * ggroup_charge_sub() - uncharge bytes from a process and every group above it
 * @group: the group of the process
 * @nbytes: bytes to uncharge
 *
 * Return: 0, -ENODEV, or -EINVAL also for more than it holds.
 */
int ggroup_charge_sub(struct ggroup *group, u64 nbytes);

/**
 * ggroup_charge_sub_swap() - uncharge swapped bytes from a process and every group above it
 * @group: the group of the process
 * @nbytes: bytes to uncharge
 *
 * Return: 0, -ENODEV, or -EINVAL also for more than it has swapped.
 */
int ggroup_charge_sub_swap(struct ggroup *group, u64 nbytes);

/**
 * ggroup_charge_swap_out() - book bytes that were moved to the host
 * @group: the group of the process
 * @nbytes: bytes that were moved
 * @usec: time that it took, in microseconds
 * @tenant: the move is self-reported, so its statistics are bounded
 *
 * Return: 0, -ENODEV, -EINVAL also for more than it holds, -ENOSPC over some swap_max.
 */
int ggroup_charge_swap_out(struct ggroup *group, u64 nbytes, u64 usec, bool tenant);

/**
 * ggroup_charge_swap_in() - book bytes that are moved to the GPU
 * @group: the group of the process
 * @nbytes: bytes to move
 * @usec: time that it took, in microseconds
 * @tenant: the move is self-reported, so its statistics are bounded
 *
 * Return: 0, -ENODEV, -EINVAL also for more than it has swapped, -EAGAIN over some high.
 */
int ggroup_charge_swap_in(struct ggroup *group, u64 nbytes, u64 usec, bool tenant);

/**
 * ggroup_charge_observe() - set a process's figure to the driver's
 * @group: the group of the process
 * @nbytes: bytes that it holds
 *
 * Return: 0, -ENODEV, or -EINVAL also where a level would hold more than GGROUP_MAX.
 */
int ggroup_charge_observe(struct ggroup *group, u64 nbytes);

/**
 * ggroup_charge_shift() - add to the figures of a group and of every one above it
 * @group: the group
 * @held: bytes on the GPU; the caller has checked that every figure allows them
 * @swapped: bytes in the host; likewise
 *
 * Context: the device's lock is held for writing, or for reading with its figures.
 */
void ggroup_charge_shift(struct ggroup *group, s64 held, s64 swapped);

#endif
