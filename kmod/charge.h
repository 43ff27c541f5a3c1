/* SPDX-License-Identifier: GPL-2.0 */
/* Charging: figures that are added up the tree, by many CPUs at once. */
#ifndef GGROUP_CHARGE_H
#define GGROUP_CHARGE_H

#include <linux/types.h>

struct ggroup;

/*
 * Each takes the device's lock by itself, and is refused with -ENODEV for a group that has left
 * the tree and -EINVAL for one that is no process or for more than GGROUP_MAX. @tenant: a program
 * says it of itself, so what it says is bounded; and nobody settles afterwards, so the workers are
 * woken.
 */
int ggroup_charge(struct ggroup *group, u64 nbytes, bool tenant);
int ggroup_uncharge(struct ggroup *group, u64 nbytes);
int ggroup_uncharge_swap(struct ggroup *group, u64 nbytes);
int ggroup_swap_out(struct ggroup *group, u64 nbytes, u64 usec, bool tenant);
int ggroup_swap_in(struct ggroup *group, u64 nbytes, u64 usec, bool tenant);
int ggroup_observe(struct ggroup *group, u64 nbytes);

/*
 * Adds to the figures of a group and of every one above it, which the caller has looked at. With
 * the device's lock held for writing, or for reading with its figures.
 */
void ggroup_shift(struct ggroup *group, s64 held, s64 swapped);
/*
 * Counts an event in a group and in every one above it, and tells the listener. With the device's
 * lock held.
 */
void ggroup_count(struct ggroup *group, unsigned int event);

#endif
