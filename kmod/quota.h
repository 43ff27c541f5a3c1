/* SPDX-License-Identifier: GPL-2.0 */
/* How many groups of a GPU one user has: nobody can use up what there are for all others. */
#ifndef GGROUP_QUOTA_H
#define GGROUP_QUOTA_H

#include <linux/types.h>

struct ggroup;

/*
 * Counts a new group below @parent: a process for its own user, a slice for whoever controls
 * @parent, as far as that is somebody else than root. -EAGAIN where that user has as many as may
 * be, or the slice is too deep, -ENOMEM.
 *
 * All with the device's lock held for writing.
 */
int ggroup_quota_take(struct ggroup *group, const struct ggroup *parent);
void ggroup_quota_give(struct ggroup *group);
/* Whether @group and what is below it would be too deep below @parent: -EAGAIN. */
int ggroup_quota_depth(struct ggroup *group, const struct ggroup *parent);

#endif
