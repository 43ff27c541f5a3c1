// SPDX-License-Identifier: GPL-2.0
/* The binding of an open /dev/ggroup. */

#include <linux/errno.h>
#include <linux/mutex.h>

#include "file.h"

int ggroup_file_lock_unused(struct ggroup_file *file)
{
	/* A JOIN may hold it for as long as a provider takes. */
	int err = mutex_lock_interruptible(&file->bind);

	if (err)
		return err;
	if (!file->group && !file->device)
		return 0;
	mutex_unlock(&file->bind);
	return -EBUSY;
}
