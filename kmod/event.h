/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The stream of events of one GPU, for the daemon. Its size is bounded, since unread events are
 * counted rather than queued.
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
 * struct ggroup_pending - the unread events of one group and channel
 * @node: on the device's list while @count is not 0
 * @count: number of events; stays at U32_MAX
 * @channel: GGROUP_CHANNEL_*
 */
struct ggroup_pending {
	struct list_head node;
	u32 count;
	u32 channel;
};

/**
 * struct ggroup_inbox - the unread events of one group
 * @pending: by channel
 * @closed: the group left the tree, so no more events are kept for it
 */
struct ggroup_inbox {
	struct ggroup_pending pending[GGROUP_CHANNELS];
	bool closed;
};

/**
 * struct ggroup_stream - the events of one GPU
 * @lock: protects this and the inboxes; a leaf
 * @open: there is a listener
 * @gone: the root left the tree, and with it the GPU
 * @pending: unread events, oldest first
 * @wait: a listener that waits for one
 */
struct ggroup_stream {
	spinlock_t lock;	/* a leaf */
	bool open;
	bool gone;
	struct list_head pending;
	wait_queue_head_t wait;
};

/**
 * ggroup_event_init_stream() - make the stream of a new device
 * @stream: the stream
 */
void ggroup_event_init_stream(struct ggroup_stream *stream);

/**
 * ggroup_event_init_inbox() - make the inbox of a new group
 * @inbox: the inbox
 */
void ggroup_event_init_inbox(struct ggroup_inbox *inbox);

/**
 * ggroup_event_tell() - tell the listener that something happened to a group
 * @group: the group
 * @channel: GGROUP_CHANNEL_*
 *
 * Context: any but NMI. Never sleeps, never allocates.
 */
void ggroup_event_tell(struct ggroup *group, u32 channel);

/**
 * ggroup_event_count() - count an event in a group and in every one above, and tell the listener
 * @group: the group
 * @event: GGROUP_EVENT_*
 *
 * Context: the device's lock is held.
 */
void ggroup_event_count(struct ggroup *group, unsigned int event);

/**
 * ggroup_event_drop() - drop the unread events of a group that leaves the tree
 * @group: the group
 *
 * No more events are taken for it, on any channel. With the root, the stream ends: the listener
 * gets -ENODEV and EPOLLHUP.
 */
void ggroup_event_drop(struct ggroup *group);

/**
 * ggroup_event_fd() - do GGROUP_IOC_EVENTS
 * @device: the GPU
 * @flags: O_CLOEXEC, O_NONBLOCK
 * @file: the file to install at the returned number; or both are to be put back
 *
 * Return: a reserved number; -EBUSY where there is a listener, -ENODEV, -EMFILE, -ENOMEM, or
 * -EINVAL for other flags.
 */
int ggroup_event_fd(struct ggroup_device *device, u32 flags, struct file **file);

#endif
