/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The stream of events of one GPU, for the daemon: bounded, since what is not read yet is counted,
 * not queued.
 */
#ifndef GGROUP_EVENT_H
#define GGROUP_EVENT_H

#include <linux/list.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>

#include "uapi/ggroup.h"

struct file;
struct ggroup;
struct ggroup_device;

#define GGROUP_CHANNELS		4	/* GGROUP_CHANNEL_*, which begin at 1 */

/**
 * struct ggroup_pending - the events of one group and channel that the listener has not read
 * @node: on the device's list while @count is not 0
 * @count: how many; stays at U32_MAX
 * @channel: GGROUP_CHANNEL_*
 */
struct ggroup_pending {
	struct list_head node;
	u32 count;
	u32 channel;
};

/**
 * struct ggroup_inbox - the events of one group that the listener has not read
 * @pending: by channel
 * @closed: the group left the tree, so nothing is kept for it any more
 */
struct ggroup_inbox {
	struct ggroup_pending pending[GGROUP_CHANNELS];
	bool closed;
};

/**
 * struct ggroup_stream - the events of one GPU
 * @lock: protects this and the inboxes; a leaf
 * @open: somebody listens
 * @gone: the root left the tree, and with it the GPU
 * @pending: what is not read, oldest first
 * @wait: who waits for one
 */
struct ggroup_stream {
	spinlock_t lock;	/* a leaf */
	bool open;
	bool gone;
	struct list_head pending;
	wait_queue_head_t wait;
};

void ggroup_stream_init(struct ggroup_stream *stream);
void ggroup_inbox_init(struct ggroup_inbox *inbox);
/*
 * Something happened to a group. Never sleeps, never allocates; nothing without a listener. Any
 * context but NMI.
 */
void ggroup_tell(struct ggroup *group, u32 channel);
/*
 * The group leaves the tree: what nobody has read of it is dropped, on all channels, and nothing is
 * taken any more. When the root does, the stream is at its end: -ENODEV and EPOLLHUP for the
 * listener.
 */
void ggroup_inbox_drop(struct ggroup *group);
/*
 * EVENTS: a number that is reserved for a new descriptor that hears of @device; *@file is to be
 * installed there, or both put back. -EBUSY where somebody listens, -ENODEV, -EINVAL for flags.
 */
int ggroup_stream_fd(struct ggroup_device *device, u32 flags, struct file **file);

#endif
