// SPDX-License-Identifier: GPL-2.0
/* Groups: how they are found, added, moved and removed. */

#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/stringhash.h>
#include <linux/xarray.h>

#include "charge.h"
#include "exit.h"
#include "group.h"
#include "reclaim.h"

#define GGROUP_GROUPS_MOST	65536	/* of one GPU */

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

/* References */

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

void ggroup_reap(struct ggroup_device *device)
{
	struct hlist_node *next;
	struct ggroup *group;
	int bucket;

	hash_for_each_safe(device->processes, bucket, next, group, name)
		if (group->dead)
			ggroup_remove(group);
}

/* Coming and going */

static struct ggroup *new_group(struct ggroup_device *device, u32 kind)
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
	INIT_HLIST_NODE(&group->name);
	ggroup_exit_init(group);
	INIT_WORK(&group->reclaim_work, ggroup_reclaim_work);
	group->high = GGROUP_MAX;
	group->swap_max = GGROUP_MAX;
	group->priority = GGROUP_PRIORITY_DEFAULT;
	group->weight = GGROUP_WEIGHT_DEFAULT;
	group->owner = INVALID_UID;
	group->gid = INVALID_GID;
	ggroup_usermem_init(&group->usermem);
	ggroup_inbox_init(&group->inbox);
	ggroup_levers_init(group->levers);
	return group;
}

/* From here on it is found, and the tree holds the caller's reference. */
static int enter(struct ggroup *group, struct ggroup *parent)
{
	int err = xa_insert(&ggroups, group->id, group, GFP_KERNEL_ACCOUNT);

	if (err)
		return err;
	group->alive = true;
	group->device->groups++;
	if (!parent)
		return 0;
	group->parent = parent;
	list_add_tail(&group->sibling, &parent->children);
	return 0;
}

struct ggroup *ggroup_new_root(struct ggroup_device *device, u64 capacity)
{
	struct ggroup *root = new_group(device, GGROUP_KIND_ROOT);
	int err;

	if (!root)
		return ERR_PTR(-ENOMEM);
	root->high = capacity;
	err = enter(root, NULL);
	if (!err)
		return root;
	ggroup_put(root);
	return ERR_PTR(err);
}

static void leave(struct ggroup *group)
{
	if (group->parent) {
		ggroup_shift(group->parent, -atomic64_read(&group->current_bytes),
			     -atomic64_read(&group->swap));
		list_del_init(&group->sibling);
	}
	hash_del(&group->name);
	ggroup_exit_unwatch(group);
	xa_erase(&ggroups, group->id);
	group->device->groups--;
	WRITE_ONCE(group->alive, false);
	group->parent = NULL;
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

void ggroup_close_all(struct ggroup_device *device)
{
	struct ggroup *pos, *next;

	for (pos = ggroup_first_post(device->root); pos; pos = next) {
		next = ggroup_next_post(pos, device->root);
		leave(pos);
	}
}

/* Names */

struct ggroup *ggroup_of_pid(struct ggroup_device *device, struct pid *pid)
{
	struct ggroup *group;

	hash_for_each_possible(device->processes, group, name, (unsigned long)pid)
		if (group->pid == pid)
			return group;
	return NULL;
}

static u32 path_hash(const struct ggroup_device *device, const char *path)
{
	return full_name_hash(device, path, strlen(path));
}

static struct ggroup *slice_of_path(struct ggroup_device *device, const char *path)
{
	struct ggroup *group;

	if (!strcmp(path, "/"))
		return device->root;
	hash_for_each_possible(device->slices, group, name, path_hash(device, path))
		if (!strcmp(group->path, path))
			return group;
	return NULL;
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

/* A GPU by the id of its root, with a reference to the root. */
static struct ggroup *find_root(u64 id)
{
	struct ggroup *root = ggroup_find(id);

	if (root && root->kind != GGROUP_KIND_ROOT) {
		ggroup_put(root);
		root = NULL;
	}
	return root;
}

static int check_name(const struct ggroup_group *arg)
{
	if (arg->kind == GGROUP_KIND_PROCESS)
		return arg->pid > 0 ? 0 : -EINVAL;
	if (arg->kind != GGROUP_KIND_SLICE)
		return -EINVAL;
	if (arg->path[0] != '/' || strnlen(arg->path, GGROUP_PATH_LEN) == GGROUP_PATH_LEN)
		return -EINVAL;
	return 0;
}

/* The group of that name. With the device's lock held. */
static struct ggroup *named(struct ggroup_device *device, const struct ggroup_group *arg,
			    struct pid *pid)
{
	struct ggroup *group;

	if (arg->kind == GGROUP_KIND_SLICE)
		return slice_of_path(device, arg->path);
	group = pid ? ggroup_of_pid(device, pid) : NULL;
	return group && group->start == arg->start ? group : NULL;
}

static int add(struct ggroup_device *device, struct ggroup_group *arg, struct ggroup *parent,
	       struct pid *pid)
{
	struct ggroup *group;
	int err;

	if (device->gone)
		return -ENODEV;
	if (named(device, arg, pid))
		return -EEXIST;
	if (!parent || !READ_ONCE(parent->alive))
		return -ENODEV;
	if (parent->device != device)
		return -EXDEV;
	if (parent->kind == GGROUP_KIND_PROCESS)
		return -EINVAL;
	if (device->groups >= GGROUP_GROUPS_MOST)
		return -ENOSPC;
	group = new_group(device, arg->kind);
	if (!group)
		return -ENOMEM;
	if (arg->kind == GGROUP_KIND_SLICE) {
		group->path = kstrdup(arg->path, GFP_KERNEL_ACCOUNT);
		err = group->path ? 0 : -ENOMEM;
	} else {
		err = ggroup_exit_watch(group, pid, arg->start);
	}
	if (err)
		goto err_new;
	err = enter(group, parent);
	if (err)
		goto err_watch;
	arg->id = group->id;
	if (arg->kind == GGROUP_KIND_SLICE)
		hash_add(device->slices, &group->name, path_hash(device, group->path));
	else
		hash_add(device->processes, &group->name, (unsigned long)pid);
	return 0;

err_watch:
	ggroup_exit_unwatch(group);
err_new:
	ggroup_put(group);
	return err;
}

/**
 * struct name - what ADD and FIND are asked for
 * @root: of the GPU, with a reference
 * @pid: process: who, with a reference; NULL where there is none
 */
struct name {
	struct ggroup *root;
	struct pid *pid;
};

static int get_name(const struct ggroup_group *arg, struct name *name)
{
	int err = check_name(arg);

	if (err)
		return err;
	name->root = find_root(arg->root);
	if (!name->root)
		return -ENODEV;
	name->pid = arg->kind == GGROUP_KIND_PROCESS ? find_get_pid(arg->pid) : NULL;
	return 0;
}

static void put_name(struct name *name)
{
	put_pid(name->pid);
	ggroup_put(name->root);
}

int ggroup_add(struct ggroup_group *arg)
{
	struct ggroup_device *device;
	struct ggroup *parent;
	struct name name;
	int err;

	err = get_name(arg, &name);
	if (err)
		return err;
	device = name.root->device;
	parent = ggroup_find(arg->parent);
	down_write(&device->lock);
	err = add(device, arg, parent, name.pid);
	up_write(&device->lock);
	if (parent)
		ggroup_put(parent);
	put_name(&name);
	return err;
}

static int look_up(struct ggroup_group *arg, const struct name *name, bool admin)
{
	struct ggroup_device *device = name->root->device;
	struct ggroup *group;
	int err = 0;

	down_read(&device->lock);
	group = name->root->alive ? named(device, arg, name->pid) : NULL;
	if (!group) {
		err = -ENODEV;
	} else if (!admin && !ggroup_owned(group)) {
		err = -EPERM;
	} else {
		arg->id = group->id;
		arg->parent = group->parent ? group->parent->id : 0;
	}
	up_read(&device->lock);
	return err;
}

int ggroup_look_up(struct ggroup_group *arg, bool admin)
{
	struct name name;
	int err;

	err = get_name(arg, &name);
	if (!err) {
		err = look_up(arg, &name, admin);
		put_name(&name);
	}
	/* Who may not know which names there are is told the same of each. */
	return err == -ENODEV && !admin ? -EPERM : err;
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
	struct ggroup *root = arg->root ? find_root(arg->root) : NULL;
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

static int move(struct ggroup *group, struct ggroup *parent)
{
	s64 held = atomic64_read(&group->current_bytes), swapped = atomic64_read(&group->swap);
	struct ggroup *level;

	if (!group->alive || !READ_ONCE(parent->alive))
		return -ENODEV;
	if (!group->parent || parent->kind == GGROUP_KIND_PROCESS)
		return -EINVAL;
	if (parent->device != group->device)
		return -EINVAL;
	for (level = parent; level; level = level->parent)
		if (level == group)
			return -EINVAL;
	ggroup_shift(group->parent, -held, -swapped);
	list_move_tail(&group->sibling, &parent->children);
	group->parent = parent;
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
