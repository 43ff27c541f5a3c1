/* SPDX-License-Identifier: GPL-2.0 */
/* How many groups of a GPU one user has: no user can take what there are from all others. */
#ifndef GGROUP_QUOTA_H
#define GGROUP_QUOTA_H

#include <linux/types.h>

struct ggroup;

/**
 * ggroup_quota_take() - count a new group for its user
 * @group: a process, for its own user; or a slice, for the user that controls @parent, where that
 *	is another one than root
 * @parent: the group that it is to be below
 *
 * Context: the device's lock is held for writing.
 * Return: 0; -EAGAIN where that user has as many as may be, or the slice is too deep; -ENOMEM.
 */
int ggroup_quota_take(struct ggroup *group, const struct ggroup *parent);

/**
 * ggroup_quota_give() - count a group no more
 * @group: the group
 *
 * Context: the device's lock is held for writing.
 */
void ggroup_quota_give(struct ggroup *group);

/**
 * ggroup_quota_depth() - say whether a group can be moved, as far as depth goes
 * @group: the group
 * @parent: the group that it is to be below
 *
 * Context: the device's lock is held for writing.
 * Return: 0, or -EAGAIN where it or what is below it would be too deep.
 */
int ggroup_quota_depth(struct ggroup *group, const struct ggroup *parent);

#endif
