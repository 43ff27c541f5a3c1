// SPDX-License-Identifier: GPL-2.0
/*
 * ggroup.ko: the books of GPU control groups. uapi/ggroup.h says what it does; this file sets the
 * module up and takes it down.
 */

#include <linux/miscdevice.h>
#include <linux/module.h>

#include "chardev.h"
#include "exit.h"
#include "group.h"
#include "reclaim.h"
#include "register.h"

#define CREATE_TRACE_POINTS
#include "trace.h"

#if BITS_PER_LONG != 64
#error "ids are 64 bits wide, and so must be what they are looked up by"
#endif

static struct miscdevice ggroup_miscdevice = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "ggroup",
	.fops = &ggroup_chardev_fops,
	.mode = 0666,	/* tenants join; every other right is checked at each call */
};

static int __init ggroup_init(void)
{
	int err;

	err = ggroup_exit_setup();
	if (err)
		return err;
	err = ggroup_reclaim_init();
	if (err)
		goto err_reclaim;
	err = misc_register(&ggroup_miscdevice);
	if (err)
		goto err_misc;
	return 0;

err_misc:
	ggroup_reclaim_exit();
err_reclaim:
	ggroup_exit_teardown();
	return err;
}

static void __exit ggroup_exit(void)
{
	misc_deregister(&ggroup_miscdevice);
	ggroup_register_exit();
	ggroup_reclaim_exit();
	ggroup_exit_teardown();
	ggroup_group_exit();
}

module_init(ggroup_init);
module_exit(ggroup_exit);
MODULE_DESCRIPTION("Control groups for GPUs");
MODULE_AUTHOR("The ggroupfs authors");
MODULE_VERSION("0.1.0");
MODULE_LICENSE("GPL");
