// SPDX-License-Identifier: GPL-2.0
/* The table of the ioctls, with the right that each needs. */

#include <linux/capability.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/nospec.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "charge.h"
#include "control.h"
#include "device.h"
#include "file.h"
#include "group.h"
#include "ioctl.h"
#include "tenant.h"
#include "trace.h"

enum right {
	NONE,		/* no group; the called function checks rights */
	ADMIN,		/* CAP_SYS_ADMIN; no group */
	ADMIN_OF,	/* to a group: CAP_SYS_ADMIN */
	CONTROL,	/* to a group: CAP_SYS_ADMIN, or the owner of a slice above */
	TENANT,		/* to a group: CAP_SYS_ADMIN, or the process itself */
	READER,		/* to a group: as CONTROL, or the process itself */
};

/**
 * struct ioctl - a row of the table
 * @cmd: its number, with the size of the arguments as this header has them
 * @right: the right that the caller needs
 * @call: the function that does it
 * @least: the size that version 1 had, where it has grown since
 * @out_for: an error after which the arguments are copied back, as after success
 */
struct ioctl {
	unsigned int cmd;
	enum right right;
	int (*call)(struct ggroup_call *call);
	size_t least;
	int out_for;
};

#define IOCTL(name, right, call, ...) \
	[_IOC_NR(GGROUP_IOC_##name)] = { GGROUP_IOC_##name, right, call, ##__VA_ARGS__ }

static const struct ioctl ioctls[] = {
	IOCTL(HELLO, NONE, ggroup_tenant_hello, offsetof(struct ggroup_hello, settings)),
	IOCTL(JOIN, NONE, ggroup_tenant_join),
	IOCTL(CHARGE, TENANT, ggroup_tenant_charge),
	IOCTL(UNCHARGE, TENANT, ggroup_tenant_uncharge),
	IOCTL(UNCHARGE_SWAP, TENANT, ggroup_tenant_uncharge_swap),
	IOCTL(SWAP_OUT, TENANT, ggroup_tenant_swap_out),
	IOCTL(SWAP_IN, TENANT, ggroup_tenant_swap_in),
	IOCTL(USERMEM, READER, ggroup_tenant_usermem),
	IOCTL(GET, READER, ggroup_tenant_get, offsetof(struct ggroup_books, swap_peak)),
	IOCTL(ADD, ADMIN, ggroup_control_add),
	IOCTL(FIND, NONE, ggroup_control_find),
	IOCTL(NEXT, ADMIN, ggroup_control_next),
	IOCTL(MOVE, ADMIN_OF, ggroup_control_move),
	IOCTL(REMOVE, ADMIN_OF, ggroup_control_remove),
	IOCTL(SET, CONTROL, ggroup_control_set, offsetofend(struct ggroup_set, gid)),
	IOCTL(RESET_PEAK, CONTROL, ggroup_control_reset_peak, offsetof(struct ggroup_reset, what)),
	IOCTL(OBSERVE, ADMIN_OF, ggroup_control_observe),
	IOCTL(NOTE, ADMIN_OF, ggroup_control_note),
	IOCTL(PRESS, CONTROL, ggroup_control_press),
	IOCTL(PLAN, CONTROL, ggroup_control_plan, 0, -ENOSPC),
#define GGROUP_LEVER(name, bit, field)	IOCTL(SET_##bit, ADMIN_OF, ggroup_control_set_##name),
#include "settings.def"
	IOCTL(ATTACH_TSG, ADMIN_OF, ggroup_control_attach_tsg),
	IOCTL(DETACH_TSG, ADMIN_OF, ggroup_control_detach_tsg),
	IOCTL(RECLAIM, CONTROL, ggroup_control_reclaim),
	IOCTL(REASONS, ADMIN_OF, ggroup_control_reasons),
	IOCTL(NEXT_USE, ADMIN_OF, ggroup_control_next_use),
	IOCTL(REGISTER, ADMIN, ggroup_control_register),
	IOCTL(UNREGISTER, NONE, ggroup_control_unregister),
	IOCTL(FORGET, ADMIN, ggroup_control_forget),
	IOCTL(EVENTS, ADMIN_OF, ggroup_control_events),
};

static bool is_owner(struct ggroup *group)
{
	bool owned;

	down_read(&group->device->lock);
	owned = group->alive && ggroup_group_owned(group);
	up_read(&group->device->lock);
	return owned;
}

/* Find the group that a call is about, and check the caller's right to it. */
static int admit(struct ggroup_call *call, enum right right)
{
	u64 id = *(u64 *)call->arg;
	bool tenant = right == TENANT || right == READER;
	struct ggroup *own = tenant ? ggroup_file_own(call->file) : NULL;

	if (tenant && (!id || (!IS_ERR_OR_NULL(own) && own->id == id))) {
		if (!own)
			return -ENODEV;
		if (IS_ERR(own))
			return PTR_ERR(own);
		call->group = ggroup_group_get(own);
		call->own = true;
		return 0;
	}
	call->admin = capable(CAP_SYS_ADMIN);
	if (right == NONE)
		return 0;
	if (right == ADMIN)
		return call->admin ? 0 : -EPERM;
	call->group = ggroup_group_find(id);
	/* A caller that may not know which ids exist gets the same error for each. */
	if (!call->group)
		return call->admin ? -ENODEV : -EPERM;
	if (call->admin)
		return 0;
	if ((right == CONTROL || right == READER) && is_owner(call->group))
		return 0;
	return -EPERM;
}

static int perform(const struct ioctl *ioctl, struct ggroup_call *call, void __user *user,
		   size_t size)
{
	size_t known = _IOC_SIZE(ioctl->cmd);
	unsigned int dir = _IOC_DIR(ioctl->cmd);
	int err;

	if (dir & _IOC_WRITE) {
		err = copy_struct_from_user(call->arg, known, user, size);
		if (err)
			return err;
	}
	err = admit(call, ioctl->right);
	if (!err)
		err = ioctl->call(call);
	if ((dir & _IOC_READ) && (!err || err == ioctl->out_for) &&
	    copy_to_user(user, call->arg, min(size, known)))
		err = -EFAULT;
	if (call->install) {
		int fd = ((struct ggroup_fd *)call->arg)->fd;

		if (!err) {
			fd_install(fd, call->install);
		} else {
			put_unused_fd(fd);
			fput(call->install);
		}
	}
	trace_ggroup_ioctl(_IOC_NR(ioctl->cmd), call->group ? call->group->id : 0, err);
	if (call->group)
		ggroup_group_put(call->group);
	return err;
}

static noinline_for_stack long by_table(struct ggroup_file *file, unsigned int cmd,
					void __user *user)
{
	u64 few[DIV_ROUND_UP(sizeof(struct ggroup_books), sizeof(u64))];
	struct ggroup_call call = { .file = file, .arg = few };
	unsigned int nr = _IOC_NR(cmd);
	const struct ioctl *ioctl;
	size_t known;
	int err;

	if (nr >= ARRAY_SIZE(ioctls))
		return -ENOTTY;
	ioctl = &ioctls[array_index_nospec(nr, ARRAY_SIZE(ioctls))];
	known = _IOC_SIZE(ioctl->cmd);
	/* The size depends on the caller's version; everything else has to match. */
	if (!ioctl->call || ((cmd ^ ioctl->cmd) & ~(_IOC_SIZEMASK << _IOC_SIZESHIFT)))
		return -ENOTTY;
	if (_IOC_SIZE(cmd) < (ioctl->least ?: known))
		return -EINVAL;
	if (known > sizeof(few)) {
		call.arg = kzalloc(known, GFP_KERNEL_ACCOUNT);
		if (!call.arg)
			return -ENOMEM;
	}
	err = perform(ioctl, &call, user, _IOC_SIZE(cmd));
	if (call.arg != few)
		kfree(call.arg);
	return err;
}

/*
 * The fast path of CHARGE and UNCHARGE as programs call them all the time: of the own group, with
 * the arguments as this header has them. Returns false for anything else, which the table handles.
 *
 * No reference is taken: the file has one from join() to its release, which does not come while one
 * of its ioctls runs.
 */
static __always_inline bool charge_own(struct ggroup_file *file, unsigned int cmd,
				       const struct ggroup_amount __user *user, int *err)
{
	struct ggroup *own = ggroup_file_own(file);
	u64 id, nbytes, usec;

	if (IS_ERR_OR_NULL(own) || !user_read_access_begin(user, sizeof(*user)))
		return false;
	unsafe_get_user(id, &user->id, fault);
	unsafe_get_user(nbytes, &user->nbytes, fault);
	unsafe_get_user(usec, &user->usec, fault);
	user_read_access_end();
	if ((id && id != own->id) || usec)
		return false;
	if (cmd == GGROUP_IOC_CHARGE)
		*err = ggroup_charge_add(own, nbytes, true);
	else
		*err = ggroup_charge_sub(own, nbytes);
	trace_ggroup_ioctl(_IOC_NR(cmd), own->id, *err);
	return true;

fault:
	user_read_access_end();
	return false;
}

long ggroup_ioctl(struct file *filp, unsigned int cmd, unsigned long address)
{
	struct ggroup_file *file = filp->private_data;
	void __user *user = (void __user *)address;
	int err;

	if ((cmd == GGROUP_IOC_CHARGE || cmd == GGROUP_IOC_UNCHARGE) &&
	    charge_own(file, cmd, user, &err))
		return err;
	return by_table(file, cmd, user);
}
