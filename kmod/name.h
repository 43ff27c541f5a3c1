/* SPDX-License-Identifier: GPL-2.0 */
/* The names of groups: a process, or the path of a slice. */
#ifndef GGROUP_NAME_H
#define GGROUP_NAME_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;
struct ggroup_device;
struct pid;

/**
 * ggroup_name_of_pid() - look up the group of a process
 * @device: the GPU
 * @pid: of the process
 *
 * Context: the device's lock is held.
 * Return: the group; NULL for none.
 */
struct ggroup *ggroup_name_of_pid(struct ggroup_device *device, struct pid *pid);

/**
 * ggroup_name_add() - do GGROUP_IOC_ADD, as the ABI has it
 * @arg: its arguments
 *
 * Return: 0 or one of its errors.
 */
int ggroup_name_add(struct ggroup_group *arg);

/**
 * ggroup_name_find() - do GGROUP_IOC_FIND, as the ABI has it
 * @arg: its arguments
 * @admin: the caller may find everything
 *
 * Return: 0 or one of its errors.
 */
int ggroup_name_find(struct ggroup_group *arg, bool admin);

#endif
