// SPDX-License-Identifier: GPL-2.0
/*
 * How a group learns that its process exited: from the queue of waiters of the struct pid, on
 * which pidfds are polled too. A group keeps a reference to its pid, so the pointer is never
 * another's.
 */

#include <linux/cred.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/time_namespace.h>

#include "exit.h"
#include "group.h"

static struct workqueue_struct *exits;

u64 ggroup_start_of(const struct task_struct *leader)
{
	/* USER_HZ is 100 wherever there are GPUs; nsec_to_clock_t() is not for modules. */
	return div_u64(timens_add_boottime_ns(leader->start_boottime), NSEC_PER_SEC / USER_HZ);
}

static bool has_exited(struct pid *pid)
{
	struct task_struct *leader;
	bool exited;

	rcu_read_lock();
	leader = pid_task(pid, PIDTYPE_TGID);
	exited = !leader || (READ_ONCE(leader->exit_state) && thread_group_empty(leader));
	rcu_read_unlock();
	return exited;
}

bool ggroup_exited(const struct ggroup *group)
{
	return READ_ONCE(group->dead) || (group->pid && has_exited(group->pid));
}

/*
 * Called with interrupts off, from the exit of the process: whatever it takes is done elsewhere.
 */
static int exit_wake(wait_queue_entry_t *wait, unsigned int mode, int flags, void *key)
{
	struct ggroup *group = container_of(wait, struct ggroup, exit_wait);

	ggroup_get(group);
	if (!queue_work(exits, &group->exit_work))
		ggroup_put(group);
	return 0;
}

static void exit_work(struct work_struct *work)
{
	struct ggroup *group = container_of(work, struct ggroup, exit_work);

	down_write(&group->device->lock);
	if (group->alive && !group->dead && has_exited(group->pid)) {
		WRITE_ONCE(group->dead, true);
		if (group->device->queue.online)
			ggroup_tell(group, GGROUP_CHANNEL_EXIT);
		else
			ggroup_remove(group);
	}
	up_write(&group->device->lock);
	ggroup_put(group);
}

void ggroup_exit_init(struct ggroup *group)
{
	init_waitqueue_func_entry(&group->exit_wait, exit_wake);
	INIT_LIST_HEAD(&group->exit_wait.entry);
	INIT_WORK(&group->exit_work, exit_work);
}

int ggroup_exit_watch(struct ggroup *group, struct pid *pid, u64 start)
{
	struct task_struct *leader = pid ? get_pid_task(pid, PIDTYPE_TGID) : NULL;
	bool same;

	if (!leader)
		return -ESRCH;
	same = ggroup_start_of(leader) == start;
	group->user = task_uid(leader);
	put_task_struct(leader);
	if (!same)
		return -ESRCH;
	group->pid = get_pid(pid);
	group->start = start;
	add_wait_queue(&pid->wait_pidfd, &group->exit_wait);
	/* Asked after we wait: an exit is seen here or there. */
	if (has_exited(pid)) {
		remove_wait_queue(&pid->wait_pidfd, &group->exit_wait);
		return -ESRCH;
	}
	return 0;
}

void ggroup_exit_unwatch(struct ggroup *group)
{
	if (group->pid)
		remove_wait_queue(&group->pid->wait_pidfd, &group->exit_wait);
}

int ggroup_exit_setup(void)
{
	exits = alloc_workqueue("ggroup-exits", WQ_UNBOUND, 0);
	return exits ? 0 : -ENOMEM;
}

void ggroup_exit_teardown(void)
{
	destroy_workqueue(exits);
}
