/* SPDX-License-Identifier: GPL-2.0 */
/* A process as the kernel knows it. */
#ifndef GGROUP_PROCESS_H
#define GGROUP_PROCESS_H

#include <linux/types.h>

struct ggroup;
struct pid;
struct task_struct;

/**
 * ggroup_process_start() - get the start time of a process
 * @leader: its first thread
 *
 * Return: clock ticks since boot: field 22 of the /proc/PID/stat that the caller sees.
 */
u64 ggroup_process_start(const struct task_struct *leader);

/**
 * ggroup_process_pid_exited() - check whether a process exited
 * @pid: of the process
 *
 * Return: true once its last thread has exited.
 */
bool ggroup_process_pid_exited(struct pid *pid);

/**
 * ggroup_process_exited() - check whether the process of a group exited
 * @group: the group
 *
 * Return: true even if the group has not been told yet; false for a group that is no process.
 */
bool ggroup_process_exited(const struct ggroup *group);

#endif
