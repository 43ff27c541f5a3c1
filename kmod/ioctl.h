/* SPDX-License-Identifier: GPL-2.0 */
/* An ioctl on its way to the function that does it, in tenant.c or control.c. */
#ifndef GGROUP_IOCTL_H
#define GGROUP_IOCTL_H

#include <linux/types.h>

struct file;
struct ggroup;
struct ggroup_file;

/**
 * struct ggroup_call - one ioctl on its way
 * @file: the file that it was made on
 * @group: the group that it is about, where its arguments begin with an id; with a reference
 * @own: that group is the caller's, by a file that joined
 * @admin: the caller may control everything
 * @arg: its arguments, of the size that this version knows
 * @install: a file for the descriptor in @arg, once nothing can fail any more
 */
struct ggroup_call {
	struct ggroup_file *file;
	struct ggroup *group;
	bool own;
	bool admin;
	void *arg;
	struct file *install;
};

/**
 * ggroup_ioctl() - do an ioctl of an open /dev/ggroup, where the caller may
 * @filp: the file
 * @cmd: its number
 * @address: address of its arguments
 *
 * Return: 0 or a negated errno.
 */
long ggroup_ioctl(struct file *filp, unsigned int cmd, unsigned long address);

#endif
