/* SPDX-License-Identifier: GPL-2.0 */
/* The life of groups: how they come, move and go. */
#ifndef GGROUP_LIFE_H
#define GGROUP_LIFE_H

#include <linux/types.h>

struct ggroup;
struct ggroup_device;

/**
 * ggroup_life_new() - make a group that no look-up finds yet
 * @device: its GPU
 * @kind: GGROUP_KIND_*
 *
 * Return: the group, with the caller's reference; NULL without memory.
 */
struct ggroup *ggroup_life_new(struct ggroup_device *device, u32 kind);

/**
 * ggroup_life_enter() - put a group into the tree, which takes over the caller's reference
 * @group: a new group
 * @parent: the group above, NULL for a root
 *
 * Context: the device's lock is held for writing, unless the device is new.
 * Return: 0 or -ENOMEM.
 */
int ggroup_life_enter(struct ggroup *group, struct ggroup *parent);

/**
 * ggroup_life_new_root() - make the root of a new device
 * @device: the device
 * @capacity: the high of its root, in bytes
 *
 * Return: the root, or ERR_PTR(-ENOMEM).
 */
struct ggroup *ggroup_life_new_root(struct ggroup_device *device, u64 capacity);

/**
 * ggroup_life_move() - move a group below another one, with its charges
 * @group: the group
 * @parent_id: the id of a slice or of the root
 *
 * Return: 0, -ENODEV, -EINVAL or -EAGAIN, as GGROUP_IOC_MOVE has them.
 */
int ggroup_life_move(struct ggroup *group, u64 parent_id);

/**
 * ggroup_life_remove() - take a group out of the tree, with its charges
 * @group: a group in the tree
 *
 * Context: the device's lock is held for writing.
 * Return: 0, or -EBUSY for a root and for a group with groups below.
 */
int ggroup_life_remove(struct ggroup *group);

/**
 * ggroup_life_reap() - remove the processes that exited, where no provider is left to do it
 * @device: their GPU
 *
 * Context: the device's lock is held for writing.
 */
void ggroup_life_reap(struct ggroup_device *device);

/**
 * ggroup_life_close_all() - take every group out of the tree, the root last
 * @device: their GPU
 *
 * Context: the device's lock is held for writing.
 */
void ggroup_life_close_all(struct ggroup_device *device);

#endif
