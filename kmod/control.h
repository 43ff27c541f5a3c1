/* SPDX-License-Identifier: GPL-2.0 */
/* An open /dev/ggroup, and its ioctls. */
#ifndef GGROUP_CONTROL_H
#define GGROUP_CONTROL_H

#include <linux/fs.h>
#include <linux/mutex.h>
#include <linux/types.h>

struct ggroup;
struct ggroup_device;
struct ggroup_user;

/**
 * struct ggroup_file - an open /dev/ggroup
 * @bind: held while the file becomes, or stops to be, a tenant's or a provider's
 * @group: JOIN: the group it is bound to, with a reference; set once
 * @device: REGISTER: the GPU it provides, with a reference; set once, since pollers wait in it
 * @registered: it still provides it
 * @user: whom it is counted for
 */
struct ggroup_file {
	struct mutex bind;	/* the fields below */
	struct ggroup *group;
	struct ggroup_device *device;
	bool registered;
	struct ggroup_user *user;
};

extern const struct file_operations ggroup_fops;

#endif
