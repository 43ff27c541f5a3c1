// SPDX-License-Identifier: GPL-2.0
/* A file of /dev/ggroup, from its open() to its release. */

#include <linux/fs.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>

#include "chardev.h"
#include "counters.h"
#include "device.h"
#include "file.h"
#include "group.h"
#include "ioctl.h"
#include "peak.h"
#include "provider.h"
#include "register.h"
#include "user.h"

static int ggroup_open(struct inode *inode, struct file *filp)
{
	struct ggroup_file *file = kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);

	if (!file)
		return -ENOMEM;
	file->user = ggroup_user_open();
	if (IS_ERR(file->user)) {
		int err = PTR_ERR(file->user);

		kfree(file);
		return err;
	}
	mutex_init(&file->bind);
	INIT_LIST_HEAD(&file->marks);
	filp->private_data = file;
	return stream_open(inode, filp);
}

static int ggroup_release(struct inode *inode, struct file *filp)
{
	struct ggroup_file *file = filp->private_data;

	if (file->registered)
		ggroup_register_leave(file, 0);
	if (file->device)
		ggroup_device_put(file->device);
	if (file->group) {
		atomic_dec(&file->group->joined);
		ggroup_group_put(file->group);
	}
	ggroup_peak_close(file);
	ggroup_user_close(file->user);
	mutex_destroy(&file->bind);
	kfree(file);
	return 0;
}

/* Return whether a file registered a GPU; it may have unregistered since. */
static bool is_provider(struct ggroup_file *file)
{
	/* Pairs with ggroup_register_enter(). */
	return smp_load_acquire(&file->device);
}

static ssize_t ggroup_read(struct file *filp, char __user *to, size_t size, loff_t *offset)
{
	struct ggroup_file *file = filp->private_data;

	if (!is_provider(file))
		return -EINVAL;
	return ggroup_provider_read(file, to, size, filp->f_flags & O_NONBLOCK);
}

static ssize_t ggroup_write(struct file *filp, const char __user *from, size_t size, loff_t *offset)
{
	struct ggroup_file *file = filp->private_data;

	if (!is_provider(file))
		return -EINVAL;
	return ggroup_provider_write(file, from, size);
}

static __poll_t ggroup_poll(struct file *filp, poll_table *wait)
{
	struct ggroup_file *file = filp->private_data;

	if (!is_provider(file))
		return EPOLLERR;
	return ggroup_provider_poll(file, filp, wait);
}

static int ggroup_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct ggroup *group = ggroup_file_own(filp->private_data);

	if (!group)
		return -ENODEV;
	if (IS_ERR(group))
		return PTR_ERR(group);
	return ggroup_counters_mmap(group, vma);
}

const struct file_operations ggroup_chardev_fops = {
	.owner = THIS_MODULE,
	.open = ggroup_open,
	.release = ggroup_release,
	.read = ggroup_read,
	.write = ggroup_write,
	.poll = ggroup_poll,
	.mmap = ggroup_mmap,
	.unlocked_ioctl = ggroup_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};
