// SPDX-License-Identifier: GPL-2.0
/* Groups: their tree, their ids, and how they come, move and go. */

#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/timekeeping.h>
#include <linux/xarray.h>

#include "charge.h"
#include "exit.h"
#include "group.h"
#include "peak.h"
#include "quota.h"
#include "reclaim.h"

/* By id; found under RCU, and then asked whether they are alive. */
static DEFINE_XARRAY(ggroups);
static atomic64_t last_id;

/* The tree */

struct ggroup *ggroup_next_pre(struct ggroup *pos, const struct ggroup *top)
{
	if (!list_empty(&pos->children))
		return list_first_entry(&pos->children, struct ggroup, sibling);
	for (; pos != top; pos = pos->parent)
		if (!list_is_last(&pos->sibling, &pos->parent->children))
			return list_next_entry(pos, sibling);
	return NULL;
}

struct ggroup *ggroup_first_post(struct ggroup *top)
{
	while (!list_empty(&top->children))
		top = list_first_entry(&top->children, struct ggroup, sibling);
	return top;
}

struct ggroup *ggroup_next_post(struct ggroup *pos, const struct ggroup *top)
{
	if (pos == top)
		return NULL;
	if (list_is_last(&pos->sibling, &pos->parent->children))
		return pos->parent;
	return ggroup_first_post(list_next_entry(pos, sibling));
}

bool ggroup_owned(const struct ggroup *group)
{
	const struct ggroup *level;

	/*
	 * The next owner above, as with the files of the tree: what was taken back from one further
	 * up is not his. Control of root's takes the capability, and a root without it has none.
	 */
	for (level = group->parent; level; level = level->parent)
		if (uid_valid(level->owner))
			return !uid_eq(level->owner, GLOBAL_ROOT_UID) &&
			       uid_eq(level->owner, current_euid());
	return false;
}

/* Ids and references */

struct ggroup *ggroup_find(u64 id)
{
	struct ggroup *group;

	rcu_read_lock();
	group = xa_load(&ggroups, id);
	if (group && !refcount_inc_not_zero(&group->ref))
		group = NULL;
	rcu_read_unlock();
	return group;
}

struct ggroup *ggroup_find_root(u64 id)
{
	struct ggroup *root = ggroup_find(id);

	if (root && root->kind != GGROUP_KIND_ROOT) {
		ggroup_put(root);
		root = NULL;
	}
	return root;
}

struct ggroup *ggroup_get(struct ggroup *group)
{
	refcount_inc(&group->ref);
	return group;
}

static void free_group(struct rcu_head *rcu)
{
	kfree(container_of(rcu, struct ggroup, rcu));
}

void ggroup_put(struct ggroup *group)
{
	if (!refcount_dec_and_test(&group->ref))
		return;
	ggroup_counters_free(group);
	put_pid(group->pid);
	kfree(group->path);
	ggroup_device_put(group->device);
	call_rcu(&group->rcu, free_group);
}

/* The group with the next greater id of a GPU, or the next root; with a reference. */
static struct ggroup *next_group(u64 id, const struct ggroup *root)
{
	struct ggroup *group;
	unsigned long index;

	if (id == U64_MAX)
		return NULL;
	rcu_read_lock();
	xa_for_each_start(&ggroups, index, group, id + 1) {
		bool fits = root ? group->device == root->device : group->kind == GGROUP_KIND_ROOT;

		if (fits && refcount_inc_not_zero(&group->ref))
			break;
	}
	rcu_read_unlock();
	return group;
}

int ggroup_next(struct ggroup_group *arg)
{
	struct ggroup *root = arg->root ? ggroup_find_root(arg->root) : NULL;
	struct ggroup *group;

	if (arg->root && !root)
		return -ENODEV;
	while ((group = next_group(arg->id, root))) {
		struct ggroup_device *device = group->device;
		bool alive;

		memset(arg->path, 0, sizeof(arg->path));
		arg->id = group->id;
		arg->kind = group->kind;
		arg->start = group->start;
		arg->pid = group->pid ? pid_vnr(group->pid) : 0;
		if (group->kind == GGROUP_KIND_ROOT)
			strscpy(arg->path, device->uuid, sizeof(arg->path));
		else if (group->path)
			strscpy(arg->path, group->path, sizeof(arg->path));
		down_read(&device->lock);
		alive = group->alive;
		arg->parent = alive && group->parent ? group->parent->id : 0;
		arg->root = alive ? device->root->id : 0;
		up_read(&device->lock);
		ggroup_put(group);
		if (alive)
			break;
	}
	if (root)
		ggroup_put(root);
	return group ? 0 : -ENOENT;
}

/* Coming and going */

struct ggroup *ggroup_new(struct ggroup_device *device, u32 kind)
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
	INIT_WORK(&group->reclaim_work, ggroup_reclaim_work);
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)	group->field = initial;
#include "settings.def"
#undef GGROUP_SETTING
	group->user = INVALID_UID;
	group->born_ns = ktime_get_ns();
	group->owner = INVALID_UID;
	group->gid = INVALID_GID;
	ggroup_usermem_init(&group->usermem);
	ggroup_inbox_init(&group->inbox);
	ggroup_levers_init(group->levers);
	return group;
}

int ggroup_enter(struct ggroup *group, struct ggroup *parent)
{
	int err = xa_insert(&ggroups, group->id, group, GFP_KERNEL_ACCOUNT);

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

struct ggroup *ggroup_new_root(struct ggroup_device *device, u64 capacity)
{
	struct ggroup *root = ggroup_new(device, GGROUP_KIND_ROOT);
	int err;

	if (!root)
		return ERR_PTR(-ENOMEM);
	root->high = capacity;
	err = ggroup_enter(root, NULL);
	if (!err)
		return root;
	ggroup_put(root);
	return ERR_PTR(err);
}

static void leave(struct ggroup *group)
{
	if (group->parent) {
		ggroup_shift(group->parent, -(s64)group->current_bytes, -(s64)group->swap);
		list_del_init(&group->sibling);
	}
	hash_del(&group->name);
	ggroup_quota_give(group);
	ggroup_exit_unwatch(group);
	xa_erase(&ggroups, group->id);
	group->device->groups--;
	WRITE_ONCE(group->alive, false);
	group->parent = NULL;
	ggroup_peak_leave(group);
	ggroup_levers_forget(group);
	ggroup_usermem_gone(group);
	ggroup_inbox_drop(group);
	ggroup_put(group);
}

int ggroup_remove(struct ggroup *group)
{
	if (!group->parent || !list_empty(&group->children))
		return -EBUSY;
	leave(group);
	return 0;
}

void ggroup_reap(struct ggroup_device *device)
{
	struct hlist_node *next;
	struct ggroup *group;
	int bucket;

	hash_for_each_safe(device->processes, bucket, next, group, name)
		if (group->dead)
			ggroup_remove(group);
}

void ggroup_close_all(struct ggroup_device *device)
{
	struct ggroup *pos, *next;

	for (pos = ggroup_first_post(device->root); pos; pos = next) {
		next = ggroup_next_post(pos, device->root);
		leave(pos);
	}
}

static int move(struct ggroup *group, struct ggroup *parent)
{
	s64 held = group->current_bytes, swapped = group->swap;
	struct ggroup *level;
	int err;

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
	ggroup_shift(group->parent, -held, -swapped);
	list_move_tail(&group->sibling, &parent->children);
	group->parent = parent;
	for (level = group; level; level = ggroup_next_pre(level, group))
		level->depth = level->parent->depth + 1;
	ggroup_shift(parent, held, swapped);
	return 0;
}

int ggroup_move(struct ggroup *group, u64 parent_id)
{
	struct ggroup *parent = ggroup_find(parent_id);
	int err;

	if (!parent)
		return -ENODEV;
	down_write(&group->device->lock);
	err = move(group, parent);
	up_write(&group->device->lock);
	ggroup_put(parent);
	return err;
}

void ggroup_group_exit(void)
{
	/* Not kfree_rcu(), which takes its time: when the module is gone, so is all that it had. */
	rcu_barrier();
	WARN_ON(!xa_empty(&ggroups));
	xa_destroy(&ggroups);
}
