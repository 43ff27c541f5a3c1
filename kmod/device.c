// SPDX-License-Identifier: GPL-2.0
/* The lifetime of a GPU, which ends with its last reference. */

#include <linux/slab.h>

#include "device.h"

struct ggroup_device *ggroup_device_get(struct ggroup_device *device)
{
	kref_get(&device->ref);
	return device;
}

static void free_device(struct kref *ref)
{
	kfree(container_of(ref, struct ggroup_device, ref));
}

void ggroup_device_put(struct ggroup_device *device)
{
	kref_put(&device->ref, free_device);
}
