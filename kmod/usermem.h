/* SPDX-License-Identifier: GPL-2.0 */
/* usermemfd: how a program learns that it is to give memory back (Ghost, 4.2). */
#ifndef GGROUP_USERMEM_H
#define GGROUP_USERMEM_H

#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

struct file;
struct ggroup;

/**
 * struct ggroup_usermem - the latest record of a group
 * @lock: protects the record, and what its descriptors have seen; a leaf
 * @nbytes: to give back
 * @seq: its number, 0 for none yet
 * @gone: the group left the tree
 * @wait: who waits for one
 */
struct ggroup_usermem {
	spinlock_t lock;	/* a leaf */
	u64 nbytes;
	u64 seq;
	bool gone;
	wait_queue_head_t wait;
};

void ggroup_usermem_init(struct ggroup_usermem *usermem);
/*
 * A new record; tells the listener too. Never sleeps: whoever reads it, or does not, holds nobody
 * up. Any context but NMI; nothing for a group that left the tree.
 */
void ggroup_press(struct ggroup *group, u64 nbytes);
/* The latest record; zeros before the first. */
void ggroup_usermem_read(struct ggroup *group, u64 *nbytes, u64 *seq);
/* The group left the tree. */
void ggroup_usermem_gone(struct ggroup *group);
/*
 * USERMEM: a number that is reserved for a new descriptor; *@file is to be installed there, or both
 * put back. -ENODEV, -EMFILE, -EINVAL for flags.
 */
int ggroup_usermem_fd(struct ggroup *group, u32 flags, struct file **file);

#endif
