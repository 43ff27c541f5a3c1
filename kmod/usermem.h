/* SPDX-License-Identifier: GPL-2.0 */
/* usermemfd: tells a program to give memory back (Ghost, 4.2). */
#ifndef GGROUP_USERMEM_H
#define GGROUP_USERMEM_H

#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

struct file;
struct ggroup;

/**
 * struct ggroup_usermem - the latest record of a group
 * @lock: protects the record, and the readers' @seen; a leaf
 * @nbytes: bytes to give back
 * @seq: its number, 0 for none yet
 * @gone: the group left the tree
 * @wait: readers that wait for one
 */
struct ggroup_usermem {
	spinlock_t lock;	/* a leaf */
	u64 nbytes;
	u64 seq;
	bool gone;
	wait_queue_head_t wait;
};

/**
 * ggroup_usermem_init() - make the channel of a new group
 * @usermem: the channel
 */
void ggroup_usermem_init(struct ggroup_usermem *usermem);

/**
 * ggroup_usermem_press() - give a group a new record, and tell the listener
 * @group: the group; nothing happens for one that left the tree
 * @nbytes: bytes to give back
 *
 * Context: any but NMI. Never sleeps: whether a program reads it or not, no other one waits.
 */
void ggroup_usermem_press(struct ggroup *group, u64 nbytes);

/**
 * ggroup_usermem_read() - get the latest record
 * @group: the group
 * @nbytes: bytes to give back; 0 before the first
 * @seq: its number; 0 before the first
 */
void ggroup_usermem_read(struct ggroup *group, u64 *nbytes, u64 *seq);

/**
 * ggroup_usermem_gone() - end the channel of a group that leaves the tree
 * @group: the group
 */
void ggroup_usermem_gone(struct ggroup *group);

/**
 * ggroup_usermem_fd() - do GGROUP_IOC_USERMEM
 * @group: the group
 * @flags: O_CLOEXEC, O_NONBLOCK
 * @file: the file to install at the returned number; or both are to be put back
 *
 * Return: a reserved number, -ENODEV, -EMFILE, -ENOMEM, or -EINVAL for other flags.
 */
int ggroup_usermem_fd(struct ggroup *group, u32 flags, struct file **file);

#endif
