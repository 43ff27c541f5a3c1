// SPDX-License-Identifier: GPL-2.0
/* The names of groups, by which they are found and added: a process, or the path of a slice. */

#include <linux/lockdep.h>
#include <linux/slab.h>
#include <linux/stringhash.h>

#include "device.h"
#include "exit.h"
#include "group.h"
#include "life.h"
#include "name.h"
#include "quota.h"

#define GGROUP_GROUPS_MOST	65536	/* of one GPU */

struct ggroup *ggroup_name_of_pid(struct ggroup_device *device, struct pid *pid)
{
	struct ggroup *group;

	lockdep_assert_held(&device->lock);
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

/* Return the group of that name; NULL for none. */
static struct ggroup *named(struct ggroup_device *device, const struct ggroup_group *arg,
			    struct pid *pid)
{
	struct ggroup *group;

	lockdep_assert_held(&device->lock);
	if (arg->kind == GGROUP_KIND_SLICE)
		return slice_of_path(device, arg->path);
	group = pid ? ggroup_name_of_pid(device, pid) : NULL;
	return group && group->start == arg->start ? group : NULL;
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

/**
 * struct name - the name that ADD and FIND are given
 * @root: root of the GPU, with a reference
 * @pid: process: its pid, with a reference; NULL for none
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
	name->root = ggroup_group_find_root(arg->root);
	if (!name->root)
		return -ENODEV;
	name->pid = arg->kind == GGROUP_KIND_PROCESS ? find_get_pid(arg->pid) : NULL;
	return 0;
}

static void put_name(struct name *name)
{
	put_pid(name->pid);
	ggroup_group_put(name->root);
}

static int add(struct ggroup_device *device, struct ggroup_group *arg, struct ggroup *parent,
	       struct pid *pid)
{
	struct ggroup *group;
	int err;

	lockdep_assert_held_write(&device->lock);
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
	group = ggroup_life_new(device, arg->kind);
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
	err = ggroup_quota_take(group, parent);
	if (err)
		goto err_watch;
	err = ggroup_life_enter(group, parent);
	if (err)
		goto err_quota;
	arg->id = group->id;
	if (arg->kind == GGROUP_KIND_SLICE)
		hash_add(device->slices, &group->name, path_hash(device, group->path));
	else
		hash_add(device->processes, &group->name, (unsigned long)pid);
	return 0;

err_quota:
	ggroup_quota_give(group);
err_watch:
	ggroup_exit_unwatch(group);
err_new:
	ggroup_group_put(group);
	return err;
}

int ggroup_name_add(struct ggroup_group *arg)
{
	struct ggroup_device *device;
	struct ggroup *parent;
	struct name name;
	int err;

	err = get_name(arg, &name);
	if (err)
		return err;
	device = name.root->device;
	parent = ggroup_group_find(arg->parent);
	down_write(&device->lock);
	err = add(device, arg, parent, name.pid);
	up_write(&device->lock);
	if (parent)
		ggroup_group_put(parent);
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
	} else if (!admin && !ggroup_group_owned(group)) {
		err = -EPERM;
	} else {
		arg->id = group->id;
		arg->parent = group->parent ? group->parent->id : 0;
	}
	up_read(&device->lock);
	return err;
}

int ggroup_name_find(struct ggroup_group *arg, bool admin)
{
	struct name name;
	int err;

	err = get_name(arg, &name);
	if (!err) {
		err = look_up(arg, &name, admin);
		put_name(&name);
	}
	/* A caller that may not know which names exist gets the same error for each. */
	return err == -ENODEV && !admin ? -EPERM : err;
}
