/* SPDX-License-Identifier: GPL-2.0 */
/* /dev/ggroup. */
#ifndef GGROUP_CHARDEV_H
#define GGROUP_CHARDEV_H

#include <linux/fs.h>

extern const struct file_operations ggroup_chardev_fops;

#endif
