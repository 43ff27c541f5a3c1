/* SPDX-License-Identifier: GPL-2.0 */
/* The number of groups of a GPU that one user has, bounded so that no user can take them all. */
#ifndef GGROUP_QUOTA_H
#define GGROUP_QUOTA_H

#include <linux/types.h>

struct ggroup;

/**
 * ggroup_quota_take() - count a new group for its user
 * @group: a process, counted for its own user; or a slice, for the user that controls @parent,
 *	where that is not root
 * @parent: the group that it is to be below
 *
 * Context: the device's lock is held for writing.
 * Return: 0; -EAGAIN where that user has as many as allowed, or the slice is too deep; -ENOMEM.
 */
int ggroup_quota_take(struct ggroup *group, const struct ggroup *parent);

/**
 * ggroup_quota_give() - stop counting a group
 * @group: the group
 *
 * Context: the device's lock is held for writing.
 */
void ggroup_quota_give(struct ggroup *group);

/**
 * ggroup_quota_depth() - check whether a group can be moved, as far as depth goes
 * @group: the group
 * @parent: the group that it is to be below
 *
 * Context: the device's lock is held for writing.
 * Return: 0, or -EAGAIN where it or a group below it would be too deep.
 */
int ggroup_quota_depth(struct ggroup *group, const struct ggroup *parent);

#endif
