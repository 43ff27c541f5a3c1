/* SPDX-License-Identifier: GPL-2.0 */
/* An open /dev/ggroup, by which a program joins, or a provider registers. */
#ifndef GGROUP_FILE_H
#define GGROUP_FILE_H

#include <linux/fs.h>
#include <linux/mutex.h>
#include <linux/sched/signal.h>
#include <linux/types.h>

#include "group.h"

struct ggroup_device;
struct ggroup_user;

/**
 * struct ggroup_file - an open /dev/ggroup
 * @bind: held while the file becomes, or ceases to be, a tenant's or a provider's
 * @group: the group that JOIN bound it to, with a reference; set once
 * @device: the GPU that REGISTER bound it to, with a reference; set once, since pollers wait in it
 * @registered: it still provides @device
 * @user: the user that it is counted for
 * @marks: groups of which it has reset peaks; see peak.c
 */
struct ggroup_file {
	struct mutex bind;	/* protects the fields below */
	struct ggroup *group;
	struct ggroup_device *device;
	bool registered;
	struct ggroup_user *user;
	struct list_head marks;
};

/**
 * ggroup_file_lock_unused() - lock @bind of a file that neither joined nor registered
 * @file: the file
 *
 * Return: 0 with the lock held, -EBUSY for a file that did, or -EINTR.
 */
int ggroup_file_lock_unused(struct ggroup_file *file);

/**
 * ggroup_file_own() - get the group that a file joined as
 * @file: the file
 *
 * Return: the group, to which the file has a reference; NULL for a file that did not join;
 * ERR_PTR(-EPERM) where the file is another process's.
 */
static inline struct ggroup *ggroup_file_own(struct ggroup_file *file)
{
	/* Pairs with join(). */
	struct ggroup *group = smp_load_acquire(&file->group);

	if (group && group->pid != task_tgid(current))
		return ERR_PTR(-EPERM);
	return group;
}

#endif
