// SPDX-License-Identifier: GPL-2.0
/* The controlling ioctls: groups, the levers of processes, and GPUs. */

#include <linux/err.h>
#include <linux/lockdep.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/overflow.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "books.h"
#include "charge.h"
#include "control.h"
#include "device.h"
#include "event.h"
#include "file.h"
#include "group.h"
#include "ioctl.h"
#include "lever.h"
#include "life.h"
#include "name.h"
#include "peak.h"
#include "plan.h"
#include "reclaim.h"
#include "register.h"
#include "usermem.h"

/* Groups */

int ggroup_control_add(struct ggroup_call *call)
{
	return ggroup_name_add(call->arg);
}

int ggroup_control_find(struct ggroup_call *call)
{
	return ggroup_name_find(call->arg, call->admin);
}

int ggroup_control_next(struct ggroup_call *call)
{
	return ggroup_group_next(call->arg);
}

int ggroup_control_move(struct ggroup_call *call)
{
	struct ggroup_move *arg = call->arg;

	return ggroup_life_move(call->group, arg->parent);
}

int ggroup_control_remove(struct ggroup_call *call)
{
	struct ggroup *group = call->group;
	int err;

	down_write(&group->device->lock);
	err = group->alive ? ggroup_life_remove(group) : -ENODEV;
	up_write(&group->device->lock);
	return err;
}

/* Tell the provider of a new setting, unless it set that itself. */
static void tell_of_set(struct ggroup *group)
{
	lockdep_assert_held_write(&group->device->lock);
	if (group->device->queue.process != task_tgid(current))
		ggroup_event_tell(group, GGROUP_CHANNEL_SET);
}

int ggroup_control_set(struct ggroup_call *call)
{
	struct ggroup *group = call->group;
	int err;

	down_write(&group->device->lock);
	err = group->alive ? ggroup_books_set(group, call->arg, call->admin) : -ENODEV;
	if (!err)
		tell_of_set(group);
	up_write(&group->device->lock);
	return err;
}

int ggroup_control_reasons(struct ggroup_call *call)
{
	struct ggroup *group = call->group;
	int err;

	down_write(&group->device->lock);
	err = group->alive ? ggroup_books_set_reasons(group, call->arg) : -ENODEV;
	if (!err)
		tell_of_set(group);
	up_write(&group->device->lock);
	return err;
}

int ggroup_control_reset_peak(struct ggroup_call *call)
{
	struct ggroup_reset *arg = call->arg;

	if (arg->reserved || arg->what >= GGROUP_PEAKS)
		return -EINVAL;
	return ggroup_peak_reset(call->file, call->group, arg->what, call->admin);
}

int ggroup_control_observe(struct ggroup_call *call)
{
	struct ggroup_amount *arg = call->arg;

	return arg->usec ? -EINVAL : ggroup_charge_observe(call->group, arg->nbytes);
}

int ggroup_control_note(struct ggroup_call *call)
{
	struct ggroup_note *arg = call->arg;
	struct ggroup *group = call->group;
	int err = 0;

	if (arg->reserved || arg->event >= GGROUP_EVENTS)
		return -EINVAL;
	down_read(&group->device->lock);
	if (group->alive)
		ggroup_event_count(group, arg->event);
	else
		err = -ENODEV;
	up_read(&group->device->lock);
	return err;
}

int ggroup_control_press(struct ggroup_call *call)
{
	struct ggroup_amount *arg = call->arg;
	struct ggroup *group = call->group;
	int err = 0;

	if (arg->usec || arg->nbytes > GGROUP_MAX)
		return -EINVAL;
	down_read(&group->device->lock);
	if (group->alive)
		ggroup_usermem_press(group, arg->nbytes);
	else
		err = -ENODEV;
	up_read(&group->device->lock);
	return err;
}

int ggroup_control_plan(struct ggroup_call *call)
{
	struct ggroup_plan *arg = call->arg;
	struct ggroup_targets targets;
	int err;

	if (arg->nbytes > GGROUP_MAX)
		return -EINVAL;
	err = ggroup_plan_make(call->group, arg->nbytes, &targets);
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

int ggroup_control_next_use(struct ggroup_call *call)
{
	struct ggroup *root = call->group;
	struct ggroup_uses *arg = call->arg;
	struct ggroup_use *uses;
	int err;

	if (arg->reserved || arg->count > GGROUP_USES_MOST || root->kind != GGROUP_KIND_ROOT)
		return -EINVAL;
	if (!arg->count)
		return READ_ONCE(root->alive) ? 0 : -ENODEV;
	uses = vmemdup_user(u64_to_user_ptr(arg->uses), array_size(arg->count, sizeof(*uses)));
	if (IS_ERR(uses))
		return PTR_ERR(uses);
	down_write(&root->device->lock);
	err = root->alive ? ggroup_plan_foresee(root, uses, arg->count) : -ENODEV;
	up_write(&root->device->lock);
	kvfree(uses);
	return err;
}

/* Levers */

static int lever(struct ggroup_call *call, enum ggroup_lever_kind kind, u64 value)
{
	struct ggroup_command *arg = call->arg;
	u64 unused;

	if (arg->reserved || call->group->kind != GGROUP_KIND_PROCESS || value > GGROUP_MAX)
		return -EINVAL;
	return ggroup_lever_command(call->group, kind, value, arg->timeout_ms, &unused);
}

#define GGROUP_LEVER(name, bit, field)								\
int ggroup_control_set_##name(struct ggroup_call *call)						\
{												\
	struct ggroup_command *arg = call->arg;							\
												\
	return lever(call, GGROUP_LEVER_##bit, arg->value);					\
}

#include "settings.def"

int ggroup_control_attach_tsg(struct ggroup_call *call)
{
	struct ggroup_command *arg = call->arg;

	return arg->value ? -EINVAL : lever(call, GGROUP_LEVER_RUNLIST, GGROUP_RUNLIST_ON);
}

int ggroup_control_detach_tsg(struct ggroup_call *call)
{
	struct ggroup_command *arg = call->arg;

	switch (arg->value) {
	case GGROUP_ENGINES_ALL:
		return lever(call, GGROUP_LEVER_RUNLIST, GGROUP_RUNLIST_OFF);
	case GGROUP_ENGINES_GR:
		return lever(call, GGROUP_LEVER_RUNLIST, GGROUP_RUNLIST_OFF_GR);
	default:
		return -EINVAL;
	}
}

int ggroup_control_reclaim(struct ggroup_call *call)
{
	struct ggroup_command *arg = call->arg;
	u64 moved = 0;
	int err;

	if (arg->reserved || arg->value > GGROUP_MAX || arg->timeout_ms > GGROUP_TIMEOUT_MS_MOST)
		return -EINVAL;
	if (call->group->kind == GGROUP_KIND_PROCESS)
		err = ggroup_lever_command(call->group, GGROUP_LEVER_RECLAIM, arg->value,
					   arg->timeout_ms, &moved);
	else
		err = ggroup_reclaim_below(call->group, arg->value, arg->timeout_ms, &moved);
	arg->value = moved;
	return err;
}

/* GPUs */

int ggroup_control_register(struct ggroup_call *call)
{
	struct ggroup_gpu *arg = call->arg;
	int err;

	if (arg->reserved || arg->flags || !arg->uuid[0] || !ggroup_device_is_uuid(arg->uuid) ||
	    !arg->granule || arg->capacity > GGROUP_MAX || arg->granule > GGROUP_MAX ||
	    arg->headroom > GGROUP_MAX)
		return -EINVAL;
	err = ggroup_file_lock_unused(call->file);
	if (err)
		return err;
	err = ggroup_register_enter(call->file, arg);
	mutex_unlock(&call->file->bind);
	return err;
}

int ggroup_control_unregister(struct ggroup_call *call)
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
		ggroup_register_leave(file, arg->flags);
		err = 0;
	}
	mutex_unlock(&file->bind);
	return err;
}

int ggroup_control_forget(struct ggroup_call *call)
{
	struct ggroup_gpu *arg = call->arg;

	if (arg->flags || arg->reserved || !ggroup_device_is_uuid(arg->uuid))
		return -EINVAL;
	return ggroup_register_forget(arg->uuid);
}

int ggroup_control_events(struct ggroup_call *call)
{
	struct ggroup_fd *arg = call->arg;

	if (call->group->kind != GGROUP_KIND_ROOT)
		return -EINVAL;
	if (!READ_ONCE(call->group->alive))
		return -ENODEV;
	arg->fd = ggroup_event_fd(call->group->device, arg->flags, &call->install);
	return min(arg->fd, 0);
}
