// SPDX-License-Identifier: GPL-2.0
/* Groups: their tree, their ids and their references. */

#include <linux/lockdep.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/xarray.h>

#include "counters.h"
#include "device.h"
#include "group.h"

/* Groups by id, found under RCU; a finder then checks that the group is alive. */
static DEFINE_XARRAY(ggroups);

/* The tree */

struct ggroup *ggroup_group_next_pre(struct ggroup *pos, const struct ggroup *top)
{
	if (!list_empty(&pos->children))
		return list_first_entry(&pos->children, struct ggroup, sibling);
	for (; pos != top; pos = pos->parent)
		if (!list_is_last(&pos->sibling, &pos->parent->children))
			return list_next_entry(pos, sibling);
	return NULL;
}

struct ggroup *ggroup_group_first_post(struct ggroup *top)
{
	while (!list_empty(&top->children))
		top = list_first_entry(&top->children, struct ggroup, sibling);
	return top;
}

struct ggroup *ggroup_group_next_post(struct ggroup *pos, const struct ggroup *top)
{
	if (pos == top)
		return NULL;
	if (list_is_last(&pos->sibling, &pos->parent->children))
		return pos->parent;
	return ggroup_group_first_post(list_next_entry(pos, sibling));
}

bool ggroup_group_owned(const struct ggroup *group)
{
	const struct ggroup *level;

	lockdep_assert_held(&group->device->lock);
	/*
	 * Only the nearest owner above counts, as with the files of the tree: a slice that was
	 * taken back from an owner further up is no longer that owner's. Control of root's slices
	 * takes the capability; a root user without it has none.
	 */
	for (level = group->parent; level; level = level->parent)
		if (uid_valid(level->owner))
			return !uid_eq(level->owner, GLOBAL_ROOT_UID) &&
			       uid_eq(level->owner, current_euid());
	return false;
}

/* Ids and references */

struct ggroup *ggroup_group_find(u64 id)
{
	struct ggroup *group;

	rcu_read_lock();
	group = xa_load(&ggroups, id);
	if (group && !refcount_inc_not_zero(&group->ref))
		group = NULL;
	rcu_read_unlock();
	return group;
}

struct ggroup *ggroup_group_find_root(u64 id)
{
	struct ggroup *root = ggroup_group_find(id);

	if (root && root->kind != GGROUP_KIND_ROOT) {
		ggroup_group_put(root);
		root = NULL;
	}
	return root;
}

struct ggroup *ggroup_group_get(struct ggroup *group)
{
	refcount_inc(&group->ref);
	return group;
}

static void free_group(struct rcu_head *rcu)
{
	kfree(container_of(rcu, struct ggroup, rcu));
}

void ggroup_group_put(struct ggroup *group)
{
	if (!refcount_dec_and_test(&group->ref))
		return;
	ggroup_counters_free(group);
	put_pid(group->pid);
	kfree(group->path);
	ggroup_device_put(group->device);
	call_rcu(&group->rcu, free_group);
}

int ggroup_group_insert(struct ggroup *group)
{
	return xa_insert(&ggroups, group->id, group, GFP_KERNEL_ACCOUNT);
}

void ggroup_group_erase(struct ggroup *group)
{
	xa_erase(&ggroups, group->id);
}

/* Return the group of a GPU with the next greater id, or the next root; with a reference. */
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

int ggroup_group_next(struct ggroup_group *arg)
{
	struct ggroup *root = arg->root ? ggroup_group_find_root(arg->root) : NULL;
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
		ggroup_group_put(group);
		if (alive)
			break;
	}
	if (root)
		ggroup_group_put(root);
	return group ? 0 : -ENOENT;
}

void ggroup_group_exit(void)
{
	/* Not kfree_rcu(), which is late: nothing of the module may be left when it is unloaded. */
	rcu_barrier();
	WARN_ON(!xa_empty(&ggroups));
	xa_destroy(&ggroups);
}
