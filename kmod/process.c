// SPDX-License-Identifier: GPL-2.0
/* A process as the kernel knows it: its start time, and whether it has exited. */

#include <linux/math64.h>
#include <linux/pid.h>
#include <linux/sched/signal.h>
#include <linux/time_namespace.h>

#include "group.h"
#include "process.h"

u64 ggroup_process_start(const struct task_struct *leader)
{
	/* USER_HZ is 100 wherever there are GPUs; nsec_to_clock_t() is not exported to modules. */
	return div_u64(timens_add_boottime_ns(leader->start_boottime), NSEC_PER_SEC / USER_HZ);
}

bool ggroup_process_pid_exited(struct pid *pid)
{
	struct task_struct *leader;
	bool exited;

	rcu_read_lock();
	leader = pid_task(pid, PIDTYPE_TGID);
	exited = !leader || (READ_ONCE(leader->exit_state) && thread_group_empty(leader));
	rcu_read_unlock();
	return exited;
}

bool ggroup_process_exited(const struct ggroup *group)
{
	return READ_ONCE(group->dead) || (group->pid && ggroup_process_pid_exited(group->pid));
}
