// SPDX-License-Identifier: GPL-2.0
/*
 * Bounds on the groups of a GPU that one user can have. Root makes slices on behalf of the users
 * that a subtree was given to: so a slice is counted for the nearest owner at or above its parent,
 * and stays so, wherever it is moved and whatever user it is given to.
 */

#include <linux/cred.h>
#include <linux/hashtable.h>
#include <linux/lockdep.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "device.h"
#include "group.h"
#include "quota.h"

/**
 * struct ggroup_quota - a user that has groups
 * @node: in the device's table
 * @uid: its id
 * @count: number of groups, by kind
 */
struct ggroup_quota {
	struct hlist_node node;
	kuid_t uid;
	unsigned int count[GGROUP_KIND_PROCESS + 1];
};

static unsigned int processes_per_user = 4096;
module_param(processes_per_user, uint, 0644);
MODULE_PARM_DESC(processes_per_user, "Processes that a user can have on a GPU");

static unsigned int most(const struct ggroup *group)
{
	if (group->kind == GGROUP_KIND_SLICE)
		return GGROUP_MAX_SLICES_PER_USER;
	return READ_ONCE(processes_per_user);
}

static bool is_counted(const struct ggroup *group)
{
	return uid_valid(group->user) && !uid_eq(group->user, GLOBAL_ROOT_UID);
}

static kuid_t controller(const struct ggroup *parent)
{
	while (parent && !uid_valid(parent->owner))
		parent = parent->parent;
	return parent ? parent->owner : INVALID_UID;
}

static struct ggroup_quota *find(const struct ggroup *group)
{
	struct ggroup_quota *quota;

	hash_for_each_possible(group->device->quotas, quota, node, __kuid_val(group->user))
		if (uid_eq(quota->uid, group->user))
			return quota;
	return NULL;
}

static struct ggroup_quota *find_or_make(const struct ggroup *group)
{
	struct ggroup_quota *quota = find(group);

	if (quota)
		return quota;
	quota = kzalloc(sizeof(*quota), GFP_KERNEL_ACCOUNT);
	if (!quota)
		return NULL;
	quota->uid = group->user;
	hash_add(group->device->quotas, &quota->node, __kuid_val(quota->uid));
	return quota;
}

static void drop_if_idle(struct ggroup_quota *quota)
{
	if (quota->count[GGROUP_KIND_SLICE] || quota->count[GGROUP_KIND_PROCESS])
		return;
	hash_del(&quota->node);
	kfree(quota);
}

static unsigned int depth_most(kuid_t user)
{
	if (uid_valid(user) && !uid_eq(user, GLOBAL_ROOT_UID))
		return GGROUP_MAX_DEPTH;
	return GGROUP_MAX_DEPTH_ROOT;
}

int ggroup_quota_take(struct ggroup *group, const struct ggroup *parent)
{
	struct ggroup_quota *quota;

	lockdep_assert_held_write(&group->device->lock);
	if (group->kind == GGROUP_KIND_SLICE) {
		group->user = controller(parent);
		if (parent->depth >= depth_most(group->user))
			return -EAGAIN;
	}
	if (!is_counted(group))
		return 0;
	quota = find_or_make(group);
	if (!quota)
		return -ENOMEM;
	if (quota->count[group->kind] >= most(group)) {
		drop_if_idle(quota);	/* it is new, and no user may have any */
		return -EAGAIN;
	}
	quota->count[group->kind]++;
	return 0;
}

void ggroup_quota_give(struct ggroup *group)
{
	struct ggroup_quota *quota;

	lockdep_assert_held_write(&group->device->lock);
	if (!is_counted(group))
		return;
	quota = find(group);
	if (WARN_ON_ONCE(!quota || !quota->count[group->kind]))
		return;
	quota->count[group->kind]--;
	drop_if_idle(quota);
}

int ggroup_quota_depth(struct ggroup *group, const struct ggroup *parent)
{
	unsigned int height = 0;
	struct ggroup *pos;

	lockdep_assert_held_write(&group->device->lock);
	for (pos = group; pos; pos = ggroup_group_next_pre(pos, group))
		if (pos->kind == GGROUP_KIND_SLICE)
			height = max(height, pos->depth - group->depth + 1);
	if (!height)	/* a process is as deep as its slice */
		return 0;
	return parent->depth + height > depth_most(controller(parent)) ? -EAGAIN : 0;
}
