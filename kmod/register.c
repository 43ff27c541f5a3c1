// SPDX-License-Identifier: GPL-2.0
/* The register of GPUs, by their UUID: their books outlive the providers that serve them. */

#include <linux/err.h>
#include <linux/lockdep.h>
#include <linux/mutex.h>
#include <linux/slab.h>

#include "charge.h"
#include "device.h"
#include "file.h"
#include "group.h"
#include "life.h"
#include "provider.h"
#include "register.h"

#define GGROUP_DEVICES_MOST	64

static LIST_HEAD(devices);
static unsigned int devices_count;
static DEFINE_MUTEX(devices_lock);	/* protects the list; taken outside a device's lock */

static struct ggroup_device *find(const char *uuid)
{
	struct ggroup_device *device;

	lockdep_assert_held(&devices_lock);
	list_for_each_entry(device, &devices, node)
		if (!strcmp(device->uuid, uuid))
			return device;
	return NULL;
}

struct ggroup_device *ggroup_register_find(const char *uuid)
{
	struct ggroup_device *device;

	mutex_lock(&devices_lock);
	device = find(uuid);
	if (device)
		ggroup_device_get(device);
	mutex_unlock(&devices_lock);
	return device;
}

static struct ggroup_device *open_books(const struct ggroup_gpu *arg)
{
	struct ggroup_device *device;
	struct ggroup *root;

	lockdep_assert_held(&devices_lock);
	if (devices_count >= GGROUP_DEVICES_MOST)
		return ERR_PTR(-ENOSPC);
	device = kzalloc(sizeof(*device), GFP_KERNEL_ACCOUNT);
	if (!device)
		return ERR_PTR(-ENOMEM);
	kref_init(&device->ref);
	strscpy(device->uuid, arg->uuid, sizeof(device->uuid));
	init_rwsem(&device->lock);
	spin_lock_init(&device->figures);
	hash_init(device->processes);
	hash_init(device->slices);
	hash_init(device->quotas);
	ggroup_queue_init(&device->queue);
	ggroup_event_init_stream(&device->stream);
	root = ggroup_life_new_root(device, arg->capacity);
	if (IS_ERR(root)) {
		ggroup_device_put(device);
		return ERR_CAST(root);
	}
	device->root = root;
	list_add_tail(&device->node, &devices);
	devices_count++;
	return device;
}

/* No look-up finds the device any more. The register's reference is the caller's to put. */
static void close_books(struct ggroup_device *device)
{
	lockdep_assert_held(&devices_lock);
	lockdep_assert_held_write(&device->lock);
	device->gone = true;
	ggroup_life_close_all(device);
	list_del(&device->node);
	devices_count--;
}

/* The former provider's charges are void; a process that joined charges for itself. */
static void void_charges(struct ggroup_device *device)
{
	struct ggroup *group;
	int bucket;

	lockdep_assert_held_write(&device->lock);
	hash_for_each(device->processes, bucket, group, name)
		if (!atomic_read(&group->joined))
			ggroup_charge_shift(group, -(s64)group->current_bytes, -(s64)group->swap);
}

static int adopt(struct ggroup_device *device, struct ggroup_file *file, struct ggroup_gpu *arg)
{
	int err = 0;

	down_write(&device->lock);
	if (ggroup_provider_come(device, file)) {
		device->granule = arg->granule;
		device->headroom = arg->headroom;
		device->root->high = arg->capacity;
		arg->root = device->root->id;
		if (arg->flags & GGROUP_GPU_INHERITED)
			void_charges(device);
	} else {
		err = -EBUSY;
	}
	up_write(&device->lock);
	return err;
}

int ggroup_register_enter(struct ggroup_file *file, struct ggroup_gpu *arg)
{
	struct ggroup_device *device;
	int err;

	lockdep_assert_held(&file->bind);
	mutex_lock(&devices_lock);
	device = find(arg->uuid);
	arg->flags = device ? GGROUP_GPU_INHERITED : 0;
	if (!device)
		device = open_books(arg);
	err = PTR_ERR_OR_ZERO(device);
	if (!err)
		err = adopt(device, file, arg);
	if (!err) {
		file->registered = true;
		/* Pairs with is_provider(): from now on the file is used without a lock. */
		smp_store_release(&file->device, ggroup_device_get(device));
	}
	mutex_unlock(&devices_lock);
	return err;
}

void ggroup_register_leave(struct ggroup_file *file, u32 flags)
{
	struct ggroup_device *device = file->device;

	mutex_lock(&devices_lock);
	down_write(&device->lock);
	ggroup_provider_go(device, flags & GGROUP_UNREGISTER_RELEASED);
	ggroup_life_reap(device);
	if (flags & GGROUP_UNREGISTER_FORGET)
		close_books(device);
	up_write(&device->lock);
	mutex_unlock(&devices_lock);
	if (flags & GGROUP_UNREGISTER_FORGET)
		ggroup_device_put(device);
	file->registered = false;
}

int ggroup_register_forget(const char *uuid)
{
	struct ggroup_device *device;
	int err = 0;

	mutex_lock(&devices_lock);
	device = find(uuid);
	if (!device) {
		mutex_unlock(&devices_lock);
		return -ENODEV;
	}
	down_write(&device->lock);
	if (device->queue.online)
		err = -EBUSY;
	else
		close_books(device);
	up_write(&device->lock);
	mutex_unlock(&devices_lock);
	if (!err)
		ggroup_device_put(device);
	return err;
}

void ggroup_register_exit(void)
{
	struct ggroup_device *device, *next;

	mutex_lock(&devices_lock);
	list_for_each_entry_safe(device, next, &devices, node) {
		down_write(&device->lock);
		close_books(device);
		up_write(&device->lock);
		ggroup_device_put(device);
	}
	mutex_unlock(&devices_lock);
}
