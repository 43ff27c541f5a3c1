/* SPDX-License-Identifier: GPL-2.0 */
/* Exits of processes. */
#ifndef GGROUP_EXIT_H
#define GGROUP_EXIT_H

#include <linux/types.h>

struct ggroup;
struct pid;
struct task_struct;

/*
 * When a process began, in clock ticks since boot: field 22 of the /proc/PID/stat that the caller
 * sees.
 */
u64 ggroup_start_of(const struct task_struct *leader);

void ggroup_exit_init(struct ggroup *group);
/* Binds a group to a process. -ESRCH for one that does not live, or began at another time. */
int ggroup_exit_watch(struct ggroup *group, struct pid *pid, u64 start);
void ggroup_exit_unwatch(struct ggroup *group);
/* Whether its process exited, even if the group has not been told yet. */
bool ggroup_exited(const struct ggroup *group);

/* The module comes, and goes. */
int ggroup_exit_setup(void);
void ggroup_exit_teardown(void);

#endif
