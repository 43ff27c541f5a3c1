// SPDX-License-Identifier: GPL-2.0
/* The life of groups: how they come, move and go. */

#include <linux/lockdep.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>

#include "charge.h"
#include "device.h"
#include "event.h"
#include "exit.h"
#include "group.h"
#include "lever.h"
#include "life.h"
#include "peak.h"
#include "process.h"
#include "quota.h"
#include "reclaim.h"
#include "usermem.h"

static atomic64_t last_id;

static void exit_work(struct work_struct *work)
{
	struct ggroup *group = container_of(work, struct ggroup, exit_work);

	down_write(&group->device->lock);
	if (group->alive && !group->dead && ggroup_process_pid_exited(group->pid)) {
		WRITE_ONCE(group->dead, true);
		if (group->device->queue.online)
			ggroup_event_tell(group, GGROUP_CHANNEL_EXIT);
		else
			ggroup_life_remove(group);
	}
	up_write(&group->device->lock);
	ggroup_group_put(group);
}

struct ggroup *ggroup_life_new(struct ggroup_device *device, u32 kind)
{
	struct ggroup *group = kzalloc(sizeof(*group), GFP_KERNEL_ACCOUNT);

	if (!group)
		return NULL;
	refcount_set(&group->ref, 1);
	group->id = atomic64_inc_return(&last_id);
	group->kind = kind;
	group->device = ggroup_device_get(device);
	INIT_LIST_HEAD(&group->children);
	INIT_LIST_HEAD(&group->sibling);
	INIT_LIST_HEAD(&group->marks);
	INIT_HLIST_NODE(&group->name);
	ggroup_exit_init(group);
	INIT_WORK(&group->exit_work, exit_work);
	INIT_WORK(&group->reclaim_work, ggroup_reclaim_work);
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)	group->field = initial;
#include "settings.def"
	group->user = INVALID_UID;
	group->born_ns = ktime_get_ns();
	group->owner = INVALID_UID;
	group->gid = INVALID_GID;
	ggroup_usermem_init(&group->usermem);
	ggroup_event_init_inbox(&group->inbox);
	ggroup_lever_init(group->levers);
	return group;
}

int ggroup_life_enter(struct ggroup *group, struct ggroup *parent)
{
	int err;

	/* A root comes with a device that no other program can find yet. */
	if (parent)
		lockdep_assert_held_write(&group->device->lock);
	err = ggroup_group_insert(group);
	if (err)
		return err;
	group->alive = true;
	group->device->groups++;
	if (!parent)
		return 0;
	group->parent = parent;
	group->depth = parent->depth + 1;
	list_add_tail(&group->sibling, &parent->children);
	return 0;
}

struct ggroup *ggroup_life_new_root(struct ggroup_device *device, u64 capacity)
{
	struct ggroup *root = ggroup_life_new(device, GGROUP_KIND_ROOT);
	int err;

	if (!root)
		return ERR_PTR(-ENOMEM);
	root->high = capacity;
	err = ggroup_life_enter(root, NULL);
	if (!err)
		return root;
	ggroup_group_put(root);
	return ERR_PTR(err);
}

static void leave(struct ggroup *group)
{
	lockdep_assert_held_write(&group->device->lock);
	if (group->parent) {
		ggroup_charge_shift(group->parent, -(s64)group->current_bytes, -(s64)group->swap);
		list_del_init(&group->sibling);
	}
	hash_del(&group->name);
	ggroup_quota_give(group);
	ggroup_exit_unwatch(group);
	ggroup_group_erase(group);
	group->device->groups--;
	WRITE_ONCE(group->alive, false);
	group->parent = NULL;
	ggroup_peak_leave(group);
	ggroup_lever_forget(group);
	ggroup_usermem_gone(group);
	ggroup_event_drop(group);
	ggroup_group_put(group);
}

int ggroup_life_remove(struct ggroup *group)
{
	lockdep_assert_held_write(&group->device->lock);
	if (!group->parent || !list_empty(&group->children))
		return -EBUSY;
	leave(group);
	return 0;
}

void ggroup_life_reap(struct ggroup_device *device)
{
	struct hlist_node *next;
	struct ggroup *group;
	int bucket;

	lockdep_assert_held_write(&device->lock);
	hash_for_each_safe(device->processes, bucket, next, group, name)
		if (group->dead)
			ggroup_life_remove(group);
}

void ggroup_life_close_all(struct ggroup_device *device)
{
	struct ggroup *pos, *next;

	lockdep_assert_held_write(&device->lock);
	for (pos = ggroup_group_first_post(device->root); pos; pos = next) {
		next = ggroup_group_next_post(pos, device->root);
		leave(pos);
	}
}

static int move(struct ggroup *group, struct ggroup *parent)
{
	s64 held = group->current_bytes, swapped = group->swap;
	struct ggroup *level;
	int err;

	lockdep_assert_held_write(&group->device->lock);
	if (!group->alive || !READ_ONCE(parent->alive))
		return -ENODEV;
	if (!group->parent || parent->kind == GGROUP_KIND_PROCESS)
		return -EINVAL;
	if (parent->device != group->device)
		return -EINVAL;
	for (level = parent; level; level = level->parent)
		if (level == group)
			return -EINVAL;
	err = parent == group->parent ? 0 : ggroup_quota_depth(group, parent);
	if (err)
		return err;
	ggroup_charge_shift(group->parent, -held, -swapped);
	list_move_tail(&group->sibling, &parent->children);
	group->parent = parent;
	for (level = group; level; level = ggroup_group_next_pre(level, group))
		level->depth = level->parent->depth + 1;
	ggroup_charge_shift(parent, held, swapped);
	return 0;
}

int ggroup_life_move(struct ggroup *group, u64 parent_id)
{
	struct ggroup *parent = ggroup_group_find(parent_id);
	int err;

	if (!parent)
		return -ENODEV;
	down_write(&group->device->lock);
	err = move(group, parent);
	up_write(&group->device->lock);
	ggroup_group_put(parent);
	return err;
}
