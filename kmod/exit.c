// SPDX-License-Identifier: GPL-2.0
/*
 * Notice of a process's exit: a group waits on the wait queue of the struct pid, on which pidfds
 * are polled too. It keeps a reference to its pid, so the pointer never becomes another's.
 */

#include <linux/cred.h>
#include <linux/sched.h>
#include <linux/sched/task.h>
#include <linux/workqueue.h>

#include "exit.h"
#include "group.h"
#include "process.h"

static struct workqueue_struct *exits;

/* Called with interrupts off, from the exit of the process, so all the work is deferred. */
static int exit_wake(wait_queue_entry_t *wait, unsigned int mode, int flags, void *key)
{
	struct ggroup *group = container_of(wait, struct ggroup, exit_wait);

	ggroup_group_get(group);
	if (!queue_work(exits, &group->exit_work))
		ggroup_group_put(group);
	return 0;
}

void ggroup_exit_init(struct ggroup *group)
{
	init_waitqueue_func_entry(&group->exit_wait, exit_wake);
	INIT_LIST_HEAD(&group->exit_wait.entry);
}

int ggroup_exit_watch(struct ggroup *group, struct pid *pid, u64 start)
{
	struct task_struct *leader = pid ? get_pid_task(pid, PIDTYPE_TGID) : NULL;
	bool same;

	if (!leader)
		return -ESRCH;
	same = ggroup_process_start(leader) == start;
	group->user = task_uid(leader);
	put_task_struct(leader);
	if (!same)
		return -ESRCH;
	group->pid = get_pid(pid);
	group->start = start;
	add_wait_queue(&pid->wait_pidfd, &group->exit_wait);
	/* Checked once the group waits, so that no exit is missed. */
	if (ggroup_process_pid_exited(pid)) {
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
