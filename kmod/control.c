// SPDX-License-Identifier: GPL-2.0
/* An open /dev/ggroup: one table of its ioctls says what each takes, and who may call it. */

#include <linux/capability.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/nospec.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "arrival.h"
#include "charge.h"
#include "control.h"
#include "group.h"
#include "reclaim.h"
#include "trace.h"
#include "user.h"

#define GGROUP_FEATURES	(GGROUP_FEATURE_BOOKS | GGROUP_FEATURE_PROVIDER | GGROUP_FEATURE_TENANT | \
			 GGROUP_FEATURE_USERMEM | GGROUP_FEATURE_COUNTERS)

/**
 * struct call - one ioctl on its way
 * @file: what it came in by
 * @group: whom it is about, where its arguments begin with an id; with a reference
 * @own: that group is the caller's, by a file that joined
 * @admin: the caller may control everything
 * @arg: its arguments, of the size that we know
 * @install: a file for the descriptor that @arg says, once nothing can fail any more
 */
struct call {
	struct ggroup_file *file;
	struct ggroup *group;
	bool own;
	bool admin;
	void *arg;
	struct file *install;
};

enum right {
	EVERYBODY,	/* no group; what it may is looked at where it is known */
	ADMIN,		/* CAP_SYS_ADMIN; no group */
	ADMIN_OF,	/* of a group: CAP_SYS_ADMIN */
	CONTROL,	/* of a group: ... or the owner of a slice above */
	TENANT,		/* of a group: CAP_SYS_ADMIN, or the process itself */
	READER,		/* of a group: as CONTROL, or the process itself */
};

/*
 * The caller's own group, by a file that joined: NULL without. -EPERM where the file is another
 * process's.
 */
static struct ggroup *own_group(struct ggroup_file *file)
{
	/* Pairs with join(). */
	struct ggroup *group = smp_load_acquire(&file->group);

	if (group && group->pid != task_tgid(current))
		return ERR_PTR(-EPERM);
	return group;
}

/* Everybody */

static int call_hello(struct call *call)
{
	struct ggroup_hello *arg = call->arg;

	*arg = (struct ggroup_hello) {
		.version = GGROUP_ABI_VERSION,
		.features = GGROUP_FEATURES,
	};
	return 0;
}

/* Whether the caller's process joined already, with another file. */
static bool has_joined(struct ggroup_device *device)
{
	struct ggroup *group;
	bool joined;

	down_read(&device->lock);
	group = ggroup_of_pid(device, task_tgid(current));
	joined = group && atomic_read(&group->joined);
	up_read(&device->lock);
	return joined;
}

/* The group of the caller's process, with a reference; NULL for none. */
static struct ggroup *group_of_caller(struct ggroup_device *device, struct ggroup_join *arg)
{
	struct ggroup *group;

	down_read(&device->lock);
	group = device->gone ? NULL : ggroup_of_pid(device, task_tgid(current));
	if (group) {
		ggroup_get(group);
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

	/* The provider is to know, though the group may have been made before the process came. */
	if (!has_joined(device))
		err = ggroup_arrive(device, arg->timeout_ms);
	if (err)
		return err;
	group = group_of_caller(device, arg);
	if (!group)
		return -ENODEV;
	/* Pairs with own_group(): from now on the file is used without a lock. */
	smp_store_release(&file->group, group);
	return 0;
}

static bool is_terminated(const char *uuid)
{
	return strnlen(uuid, GGROUP_UUID_LEN) < GGROUP_UUID_LEN;
}

/* Locks a file that did not join, nor register: -EBUSY for one that did. */
static int lock_unused(struct ggroup_file *file)
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

static int call_join(struct call *call)
{
	struct ggroup_join *arg = call->arg;
	struct ggroup_device *device;
	int err;

	if (arg->reserved || !is_terminated(arg->uuid))
		return -EINVAL;
	device = ggroup_device_find(arg->uuid);
	if (!device)
		return -ENODEV;
	err = lock_unused(call->file);
	if (!err) {
		err = join(call->file, device, arg);
		mutex_unlock(&call->file->bind);
	}
	ggroup_device_put(device);
	return err;
}

/* Tenants */

static int call_charge(struct call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_charge(call->group, arg->nbytes, call->own);
}

static int call_uncharge(struct call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_uncharge(call->group, arg->nbytes);
}

static int call_uncharge_swap(struct call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_uncharge_swap(call->group, arg->nbytes);
}

static int call_swap_out(struct call *call)
{
	struct ggroup_amount *arg = call->arg;

	return ggroup_swap_out(call->group, arg->nbytes, arg->usec);
}

static int call_swap_in(struct call *call)
{
	struct ggroup_amount *arg = call->arg;

	return ggroup_swap_in(call->group, arg->nbytes, arg->usec);
}

static int call_usermem(struct call *call)
{
	struct ggroup_fd *arg = call->arg;

	arg->fd = ggroup_usermem_fd(call->group, arg->flags, &call->install);
	return min(arg->fd, 0);
}

static int call_get(struct call *call)
{
	struct ggroup_device *device = call->group->device;
	int err = 0;

	/* For writing, though it only reads: so the figures are of one moment. */
	down_write(&device->lock);
	if (call->group->alive)
		ggroup_get_books(call->group, call->arg);
	else
		err = -ENODEV;
	up_write(&device->lock);
	return err;
}

/* Control */

static int call_add(struct call *call)
{
	return ggroup_add(call->arg);
}

static int call_find(struct call *call)
{
	return ggroup_look_up(call->arg, call->admin);
}

static int call_next(struct call *call)
{
	return ggroup_next(call->arg);
}

static int call_move(struct call *call)
{
	struct ggroup_move *arg = call->arg;

	return ggroup_move(call->group, arg->parent);
}

static int call_remove(struct call *call)
{
	struct ggroup *group = call->group;
	int err;

	down_write(&group->device->lock);
	err = group->alive ? ggroup_remove(group) : -ENODEV;
	up_write(&group->device->lock);
	return err;
}

static int call_set(struct call *call)
{
	struct ggroup *group = call->group;
	int err;

	down_write(&group->device->lock);
	err = group->alive ? ggroup_set(group, call->arg, call->admin) : -ENODEV;
	/* What the provider sets itself it follows without being told. */
	if (!err && group->device->queue.process != task_tgid(current))
		ggroup_tell(group, GGROUP_CHANNEL_SET);
	up_write(&group->device->lock);
	return err;
}

static int call_reset_peak(struct call *call)
{
	struct ggroup *group = call->group;
	int err = 0;

	down_write(&group->device->lock);
	if (group->alive)
		atomic64_set(&group->peak, atomic64_read(&group->current_bytes));
	else
		err = -ENODEV;
	up_write(&group->device->lock);
	return err;
}

static int call_observe(struct call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_observe(call->group, arg->nbytes);
}

static int call_note(struct call *call)
{
	struct ggroup_note *arg = call->arg;
	struct ggroup *group = call->group;
	int err = 0;

	if (arg->reserved || arg->event > GGROUP_EVENT_FAIL || arg->event == GGROUP_EVENT_MAX ||
	    arg->event == GGROUP_EVENT_OOM)
		return -EINVAL;
	down_read(&group->device->lock);
	if (group->alive)
		ggroup_count(group, arg->event);
	else
		err = -ENODEV;
	up_read(&group->device->lock);
	return err;
}

static int call_press(struct call *call)
{
	struct ggroup_amount *arg = call->arg;
	struct ggroup *group = call->group;
	int err = 0;

	if (arg->usec || arg->nbytes > GGROUP_MAX)
		return -EINVAL;
	down_read(&group->device->lock);
	if (group->alive)
		ggroup_press(group, arg->nbytes);
	else
		err = -ENODEV;
	up_read(&group->device->lock);
	return err;
}

static int call_plan(struct call *call)
{
	struct ggroup_plan *arg = call->arg;
	struct ggroup_targets targets;
	int err;

	if (arg->nbytes > GGROUP_MAX)
		return -EINVAL;
	err = ggroup_plan(call->group, arg->nbytes, &targets);
	if (err)
		return err;
	arg->count = targets.count;
	if (targets.count > arg->capacity)
		err = -ENOSPC;
	else if (copy_to_user(u64_to_user_ptr(arg->targets), targets.target,
			      array_size(targets.count, sizeof(*targets.target))))
		err = -EFAULT;
	ggroup_plan_free(&targets);
	return err;
}

static int lever(struct call *call, enum ggroup_lever_kind kind, u64 value)
{
	struct ggroup_command *arg = call->arg;
	u64 unused;

	if (arg->reserved || call->group->kind != GGROUP_KIND_PROCESS || value > GGROUP_MAX)
		return -EINVAL;
	return ggroup_command(call->group, kind, value, arg->timeout_ms, &unused);
}

static int call_set_timeslice(struct call *call)
{
	struct ggroup_command *arg = call->arg;

	return lever(call, GGROUP_LEVER_TIMESLICE, arg->value);
}

static int call_attach_tsg(struct call *call)
{
	struct ggroup_command *arg = call->arg;

	return arg->value ? -EINVAL : lever(call, GGROUP_LEVER_RUNLIST, 0);
}

static int call_detach_tsg(struct call *call)
{
	struct ggroup_command *arg = call->arg;

	return arg->value ? -EINVAL : lever(call, GGROUP_LEVER_RUNLIST, 1);
}

static int call_reclaim(struct call *call)
{
	struct ggroup_command *arg = call->arg;
	u64 moved = 0;
	int err;

	if (arg->reserved || arg->value > GGROUP_MAX || arg->timeout_ms > GGROUP_TIMEOUT_MS_MOST)
		return -EINVAL;
	if (call->group->kind == GGROUP_KIND_PROCESS)
		err = ggroup_command(call->group, GGROUP_LEVER_RECLAIM, arg->value,
				     arg->timeout_ms, &moved);
	else
		err = ggroup_reclaim(call->group, arg->value, arg->timeout_ms, &moved);
	arg->value = moved;
	return err;
}

/* GPUs */

static int call_register(struct call *call)
{
	struct ggroup_gpu *arg = call->arg;
	int err;

	if (arg->reserved || arg->flags || !arg->uuid[0] || !is_terminated(arg->uuid) ||
	    !arg->granule || arg->capacity > GGROUP_MAX || arg->granule > GGROUP_MAX ||
	    arg->headroom > GGROUP_MAX)
		return -EINVAL;
	err = lock_unused(call->file);
	if (err)
		return err;
	err = ggroup_device_register(call->file, arg);
	mutex_unlock(&call->file->bind);
	return err;
}

static int call_unregister(struct call *call)
{
	struct ggroup_unregister *arg = call->arg;
	struct ggroup_file *file = call->file;
	int err;

	if (arg->reserved ||
	    arg->flags & ~(GGROUP_UNREGISTER_RELEASED | GGROUP_UNREGISTER_FORGET))
		return -EINVAL;
	err = mutex_lock_interruptible(&file->bind);
	if (err)
		return err;
	err = -EINVAL;
	if (file->registered) {
		ggroup_device_unregister(file, arg->flags);
		err = 0;
	}
	mutex_unlock(&file->bind);
	return err;
}

static int call_forget(struct call *call)
{
	struct ggroup_gpu *arg = call->arg;

	if (arg->flags || arg->reserved || !is_terminated(arg->uuid))
		return -EINVAL;
	return ggroup_device_forget(arg->uuid);
}

static int call_events(struct call *call)
{
	struct ggroup_fd *arg = call->arg;

	if (call->group->kind != GGROUP_KIND_ROOT)
		return -EINVAL;
	if (!READ_ONCE(call->group->alive))
		return -ENODEV;
	arg->fd = ggroup_stream_fd(call->group->device, arg->flags, &call->install);
	return min(arg->fd, 0);
}

/**
 * struct ioctl - a row of the table
 * @cmd: its number, with the size of the arguments as this header has them
 * @right: who may
 * @call: does it
 * @out_for: besides success, the error with which the arguments go back
 */
struct ioctl {
	unsigned int cmd;
	enum right right;
	int (*call)(struct call *call);
	int out_for;
};

#define IOCTL(name, right, call, ...) \
	[_IOC_NR(GGROUP_IOC_##name)] = { GGROUP_IOC_##name, right, call, ##__VA_ARGS__ }

static const struct ioctl ioctls[] = {
	IOCTL(HELLO, EVERYBODY, call_hello),
	IOCTL(JOIN, EVERYBODY, call_join),
	IOCTL(CHARGE, TENANT, call_charge),
	IOCTL(UNCHARGE, TENANT, call_uncharge),
	IOCTL(UNCHARGE_SWAP, TENANT, call_uncharge_swap),
	IOCTL(SWAP_OUT, TENANT, call_swap_out),
	IOCTL(SWAP_IN, TENANT, call_swap_in),
	IOCTL(USERMEM, READER, call_usermem),
	IOCTL(GET, READER, call_get),
	IOCTL(ADD, ADMIN, call_add),
	IOCTL(FIND, EVERYBODY, call_find),
	IOCTL(NEXT, ADMIN, call_next),
	IOCTL(MOVE, ADMIN_OF, call_move),
	IOCTL(REMOVE, ADMIN_OF, call_remove),
	IOCTL(SET, CONTROL, call_set),
	IOCTL(RESET_PEAK, CONTROL, call_reset_peak),
	IOCTL(OBSERVE, ADMIN_OF, call_observe),
	IOCTL(NOTE, ADMIN_OF, call_note),
	IOCTL(PRESS, CONTROL, call_press),
	IOCTL(PLAN, CONTROL, call_plan, -ENOSPC),
	IOCTL(SET_TIMESLICE, ADMIN_OF, call_set_timeslice),
	IOCTL(ATTACH_TSG, ADMIN_OF, call_attach_tsg),
	IOCTL(DETACH_TSG, ADMIN_OF, call_detach_tsg),
	IOCTL(RECLAIM, CONTROL, call_reclaim),
	IOCTL(REGISTER, ADMIN, call_register),
	IOCTL(UNREGISTER, EVERYBODY, call_unregister),
	IOCTL(FORGET, ADMIN, call_forget),
	IOCTL(EVENTS, ADMIN_OF, call_events),
};

static bool is_owner(struct ggroup *group)
{
	bool owned;

	down_read(&group->device->lock);
	owned = group->alive && ggroup_owned(group);
	up_read(&group->device->lock);
	return owned;
}

/* Finds the group that a call is about, and whether the caller may do that to it. */
static int admit(struct call *call, enum right right)
{
	u64 id = *(u64 *)call->arg;
	bool tenant = right == TENANT || right == READER;
	struct ggroup *own = tenant ? own_group(call->file) : NULL;

	if (tenant && (!id || (!IS_ERR_OR_NULL(own) && own->id == id))) {
		if (!own)
			return -ENODEV;
		if (IS_ERR(own))
			return PTR_ERR(own);
		call->group = ggroup_get(own);
		call->own = true;
		return 0;
	}
	call->admin = capable(CAP_SYS_ADMIN);
	if (right == EVERYBODY)
		return 0;
	if (right == ADMIN)
		return call->admin ? 0 : -EPERM;
	call->group = ggroup_find(id);
	/* Who may not know which ids there are is told the same of each. */
	if (!call->group)
		return call->admin ? -ENODEV : -EPERM;
	if (call->admin)
		return 0;
	if ((right == CONTROL || right == READER) && is_owner(call->group))
		return 0;
	return -EPERM;
}

static int perform(const struct ioctl *ioctl, struct call *call, void __user *user, size_t size)
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
		ggroup_put(call->group);
	return err;
}

static noinline_for_stack long by_table(struct ggroup_file *file, unsigned int cmd,
					void __user *user)
{
	u64 few[DIV_ROUND_UP(sizeof(struct ggroup_books), sizeof(u64))];
	struct call call = { .file = file, .arg = few };
	unsigned int nr = _IOC_NR(cmd);
	const struct ioctl *ioctl;
	size_t known;
	int err;

	if (nr >= ARRAY_SIZE(ioctls))
		return -ENOTTY;
	ioctl = &ioctls[array_index_nospec(nr, ARRAY_SIZE(ioctls))];
	known = _IOC_SIZE(ioctl->cmd);
	/* The size is a matter of the caller's age, the rest has to fit. */
	if (!ioctl->call || ((cmd ^ ioctl->cmd) & ~(_IOC_SIZEMASK << _IOC_SIZESHIFT)))
		return -ENOTTY;
	if (_IOC_SIZE(cmd) < known)
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
 * CHARGE and UNCHARGE as a program calls them all the time: of its own group, with the arguments
 * as this header has them. False where it is anything else, and for the table to answer.
 *
 * No reference is taken: the file has one from join() to its release, which does not come while
 * one of its ioctls runs.
 */
static __always_inline bool charge_own(struct ggroup_file *file, unsigned int cmd,
				       const struct ggroup_amount __user *user, int *err)
{
	struct ggroup *own = own_group(file);
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
		*err = ggroup_charge(own, nbytes, true);
	else
		*err = ggroup_uncharge(own, nbytes);
	trace_ggroup_ioctl(_IOC_NR(cmd), own->id, *err);
	return true;

fault:
	user_read_access_end();
	return false;
}

static long ggroup_ioctl(struct file *filp, unsigned int cmd, unsigned long address)
{
	struct ggroup_file *file = filp->private_data;
	void __user *user = (void __user *)address;
	int err;

	if ((cmd == GGROUP_IOC_CHARGE || cmd == GGROUP_IOC_UNCHARGE) &&
	    charge_own(file, cmd, user, &err))
		return err;
	return by_table(file, cmd, user);
}

/* The rest of a file's life */

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
	filp->private_data = file;
	return stream_open(inode, filp);
}

static int ggroup_release(struct inode *inode, struct file *filp)
{
	struct ggroup_file *file = filp->private_data;

	if (file->registered)
		ggroup_device_unregister(file, 0);
	if (file->device)
		ggroup_device_put(file->device);
	if (file->group) {
		atomic_dec(&file->group->joined);
		ggroup_put(file->group);
	}
	ggroup_user_close(file->user);
	mutex_destroy(&file->bind);
	kfree(file);
	return 0;
}

/* Whether a file registered a GPU; it may have unregistered since. */
static bool is_provider(struct ggroup_file *file)
{
	/* Pairs with ggroup_device_register(). */
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
	struct ggroup *group = own_group(filp->private_data);

	if (!group)
		return -ENODEV;
	if (IS_ERR(group))
		return PTR_ERR(group);
	return ggroup_counters_mmap(group, vma);
}

const struct file_operations ggroup_fops = {
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
