/* SPDX-License-Identifier: GPL-2.0 */
/* Exits of processes. */
#ifndef GGROUP_EXIT_H
#define GGROUP_EXIT_H

#include <linux/types.h>

struct ggroup;
struct pid;

/**
 * ggroup_exit_init() - make a new group ready for ggroup_exit_watch()
 * @group: the group
 */
void ggroup_exit_init(struct ggroup *group);

/**
 * ggroup_exit_watch() - bind a group to a process, whose exit then queues the group's @exit_work
 * @group: a new group
 * @pid: of the process; NULL for none
 * @start: start time of the process
 *
 * Return: 0, or -ESRCH for a process that is not alive, or started at another time.
 */
int ggroup_exit_watch(struct ggroup *group, struct pid *pid, u64 start);

/**
 * ggroup_exit_unwatch() - stop watching for a process's exit
 * @group: the group
 */
void ggroup_exit_unwatch(struct ggroup *group);

/**
 * ggroup_exit_setup() - set up, as the module is loaded
 *
 * Return: 0 or -ENOMEM.
 */
int ggroup_exit_setup(void);

/**
 * ggroup_exit_teardown() - tear down, as the module is unloaded, after the queued work
 */
void ggroup_exit_teardown(void);

#endif
