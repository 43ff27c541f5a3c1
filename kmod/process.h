/* SPDX-License-Identifier: GPL-2.0 */
/* A process as the kernel knows it. */
#ifndef GGROUP_PROCESS_H
#define GGROUP_PROCESS_H

#include <linux/types.h>

struct ggroup;
struct pid;
struct task_struct;

/**
 * ggroup_process_start() - say when a process began
 * @leader: its first thread
 *
 * Return: clock ticks since boot: field 22 of the /proc/PID/stat that the caller sees.
 */
u64 ggroup_process_start(const struct task_struct *leader);

/**
 * ggroup_process_pid_exited() - say whether a process exited
 * @pid: of the process
 *
 * Return: true from when its last thread exited.
 */
bool ggroup_process_pid_exited(struct pid *pid);

/**
 * ggroup_process_exited() - say whether the process of a group exited
 * @group: the group
 *
 * Return: true even if the group has not been told yet; false for what is no process.
 */
bool ggroup_process_exited(const struct ggroup *group);

#endif
