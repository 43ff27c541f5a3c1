// SPDX-License-Identifier: GPL-2.0
/* The ioctls of a program: it joins, and then reports what its own group does. */

#include <linux/minmax.h>
#include <linux/sched.h>

#include "arrival.h"
#include "books.h"
#include "charge.h"
#include "device.h"
#include "file.h"
#include "group.h"
#include "ioctl.h"
#include "name.h"
#include "register.h"
#include "tenant.h"
#include "usermem.h"

#define GGROUP_FEATURES	(GGROUP_FEATURE_BOOKS | GGROUP_FEATURE_PROVIDER | GGROUP_FEATURE_TENANT | \
			 GGROUP_FEATURE_USERMEM | GGROUP_FEATURE_COUNTERS | \
			 GGROUP_FEATURE_BOUNDS | GGROUP_FEATURE_PEAKS | GGROUP_FEATURE_REASONS | \
			 GGROUP_FEATURE_NEXT_USE)

int ggroup_tenant_hello(struct ggroup_call *call)
{
	struct ggroup_hello *arg = call->arg;

	*arg = (struct ggroup_hello) {
		.version = GGROUP_ABI_VERSION,
		.features = GGROUP_FEATURES,
		.settings = ggroup_books_settings(),
	};
	return 0;
}

/* Return whether the caller's process joined already, with another file. */
static bool has_joined(struct ggroup_device *device)
{
	struct ggroup *group;
	bool joined;

	down_read(&device->lock);
	group = ggroup_name_of_pid(device, task_tgid(current));
	joined = group && atomic_read(&group->joined);
	up_read(&device->lock);
	return joined;
}

/* Return the group of the caller's process, with a reference; NULL for none. */
static struct ggroup *group_of_caller(struct ggroup_device *device, struct ggroup_join *arg)
{
	struct ggroup *group;

	down_read(&device->lock);
	group = device->gone ? NULL : ggroup_name_of_pid(device, task_tgid(current));
	if (group) {
		ggroup_group_get(group);
		atomic_inc(&group->joined);
		arg->id = group->id;
		arg->root = device->root->id;
	}
	up_read(&device->lock);
	return group;
}

static int join(struct ggroup_file *file, struct ggroup_device *device, struct ggroup_join *arg)
{
	struct ggroup *group;
	int err = 0;

	/* The provider is to know, even where the group was made before the process came. */
	if (!has_joined(device))
		err = ggroup_arrival_wait(device, arg->timeout_ms);
	if (err)
		return err;
	group = group_of_caller(device, arg);
	if (!group)
		return -ENODEV;
	/* Pairs with ggroup_file_own(): from now on the file is used without a lock. */
	smp_store_release(&file->group, group);
	return 0;
}

int ggroup_tenant_join(struct ggroup_call *call)
{
	struct ggroup_join *arg = call->arg;
	struct ggroup_device *device;
	int err;

	if (arg->reserved || !ggroup_device_is_uuid(arg->uuid))
		return -EINVAL;
	device = ggroup_register_find(arg->uuid);
	if (!device)
		return -ENODEV;
	err = ggroup_file_lock_unused(call->file);
	if (!err) {
		err = join(call->file, device, arg);
		mutex_unlock(&call->file->bind);
	}
	ggroup_device_put(device);
	return err;
}

int ggroup_tenant_charge(struct ggroup_call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_charge_add(call->group, arg->nbytes, call->own);
}

int ggroup_tenant_uncharge(struct ggroup_call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_charge_sub(call->group, arg->nbytes);
}

int ggroup_tenant_uncharge_swap(struct ggroup_call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_charge_sub_swap(call->group, arg->nbytes);
}

int ggroup_tenant_swap_out(struct ggroup_call *call)
{
	struct ggroup_amount *arg = call->arg;

	return ggroup_charge_swap_out(call->group, arg->nbytes, arg->usec, call->own);
}

int ggroup_tenant_swap_in(struct ggroup_call *call)
{
	struct ggroup_amount *arg = call->arg;

	return ggroup_charge_swap_in(call->group, arg->nbytes, arg->usec, call->own);
}

int ggroup_tenant_usermem(struct ggroup_call *call)
{
	struct ggroup_fd *arg = call->arg;

	arg->fd = ggroup_usermem_fd(call->group, arg->flags, &call->install);
	return min(arg->fd, 0);
}

int ggroup_tenant_get(struct ggroup_call *call)
{
	struct ggroup_device *device = call->group->device;
	int err = 0;

	down_read(&device->lock);
	if (call->group->alive)
		ggroup_books_get(call->group, call->file, call->arg);
	else
		err = -ENODEV;
	up_read(&device->lock);
	return err;
}
