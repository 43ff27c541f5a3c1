/* SPDX-License-Identifier: GPL-2.0 */
/* The names of groups: a process, or the path of a slice. */
#ifndef GGROUP_NAME_H
#define GGROUP_NAME_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;
struct ggroup_device;
struct pid;

/* The group of a process, NULL for none. With the device's lock held. */
struct ggroup *ggroup_of_pid(struct ggroup_device *device, struct pid *pid);
/* Control: see the header of the ABI. @admin: the caller may do it everywhere. */
int ggroup_add(struct ggroup_group *arg);
int ggroup_look_up(struct ggroup_group *arg, bool admin);

#endif
