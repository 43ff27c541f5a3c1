// SPDX-License-Identifier: GPL-2.0
/*
 * Events are noted in the group that they happen to, which is then on the GPU's list until the
 * daemon reads it.
 */

#include <linux/anon_inodes.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/limits.h>
#include <linux/lockdep.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/uaccess.h>

#include "device.h"
#include "event.h"
#include "group.h"
#include "trace.h"

#define GGROUP_BATCH	8	/* events read per taking of the lock */

void ggroup_event_init_stream(struct ggroup_stream *stream)
{
	spin_lock_init(&stream->lock);
	INIT_LIST_HEAD(&stream->pending);
	init_waitqueue_head(&stream->wait);
}

void ggroup_event_init_inbox(struct ggroup_inbox *inbox)
{
	u32 i;

	for (i = 0; i < GGROUP_CHANNELS; i++) {
		INIT_LIST_HEAD(&inbox->pending[i].node);
		inbox->pending[i].channel = i + 1;
	}
}

/* Note events. Return whether to wake the listener: not for a channel that is pending already. */
static bool note(struct ggroup_stream *stream, struct ggroup_inbox *inbox, u32 channel, u32 count)
{
	struct ggroup_pending *pending = &inbox->pending[channel - 1];
	bool first = !pending->count;

	lockdep_assert_held(&stream->lock);
	/* The group of a closed inbox may be freed next. */
	if (!stream->open || inbox->closed)
		return false;
	if (first)
		list_add_tail(&pending->node, &stream->pending);
	pending->count += min(count, U32_MAX - pending->count);
	return first;
}

void ggroup_event_tell(struct ggroup *group, u32 channel)
{
	struct ggroup_stream *stream = &group->device->stream;
	unsigned long flags;

	trace_ggroup_event(group->id, channel);
	spin_lock_irqsave(&stream->lock, flags);
	if (note(stream, &group->inbox, channel, 1))
		wake_up_interruptible_poll(&stream->wait, EPOLLIN | EPOLLRDNORM);
	spin_unlock_irqrestore(&stream->lock, flags);
}

static void drop(struct ggroup_pending *pending)
{
	list_del_init(&pending->node);
	pending->count = 0;
}

void ggroup_event_drop(struct ggroup *group)
{
	struct ggroup_stream *stream = &group->device->stream;
	u32 i;

	spin_lock_irq(&stream->lock);
	group->inbox.closed = true;
	for (i = 0; i < GGROUP_CHANNELS; i++)
		drop(&group->inbox.pending[i]);
	if (group->kind == GGROUP_KIND_ROOT) {
		stream->gone = true;
		wake_up_interruptible_poll(&stream->wait, EPOLLERR | EPOLLHUP);
	}
	spin_unlock_irq(&stream->lock);
}

void ggroup_event_count(struct ggroup *group, unsigned int event)
{
	struct ggroup *level;

	lockdep_assert_held(&group->device->lock);
	for (level = group; level; level = level->parent) {
		atomic64_inc(&level->events[event]);
		ggroup_event_tell(level, GGROUP_CHANNEL_GMEM);
	}
}

/* The listener's file */

static struct ggroup *group_of(struct ggroup_pending *pending)
{
	return container_of(pending - (pending->channel - 1), struct ggroup, inbox.pending[0]);
}

/* Return the number of events, or -EAGAIN or -ENODEV. */
static int take(struct ggroup_stream *stream, struct ggroup_event *events, unsigned int most)
{
	struct ggroup_pending *pending, *next;
	int count = 0;

	spin_lock_irq(&stream->lock);
	list_for_each_entry_safe(pending, next, &stream->pending, node) {
		if (count == most)
			break;
		events[count++] = (struct ggroup_event) {
			.id = group_of(pending)->id,
			.channel = pending->channel,
			.count = pending->count,
		};
		drop(pending);
	}
	if (!count)
		count = stream->gone ? -ENODEV : -EAGAIN;
	spin_unlock_irq(&stream->lock);
	return count;
}

/*
 * Put back events that could not be copied to the reader: the next read gets them, though after
 * those that came meanwhile.
 */
static void untake(struct ggroup_stream *stream, const struct ggroup_event *events, int count)
{
	struct ggroup *group;
	int i;

	for (i = 0; i < count; i++) {
		group = ggroup_group_find(events[i].id);
		if (!group)
			continue;
		spin_lock_irq(&stream->lock);
		if (note(stream, &group->inbox, events[i].channel, events[i].count))
			wake_up_interruptible_poll(&stream->wait, EPOLLIN | EPOLLRDNORM);
		spin_unlock_irq(&stream->lock);
		ggroup_group_put(group);
	}
}

static bool readable(struct ggroup_stream *stream)
{
	bool yes;

	spin_lock_irq(&stream->lock);
	yes = stream->gone || !list_empty(&stream->pending);
	spin_unlock_irq(&stream->lock);
	return yes;
}

static ssize_t ggroup_stream_read(struct file *file, char __user *to, size_t size, loff_t *offset)
{
	struct ggroup_device *device = file->private_data;
	struct ggroup_stream *stream = &device->stream;
	struct ggroup_event events[GGROUP_BATCH];
	size_t done = 0;
	int count;

	if (size < sizeof(*events))
		return -EINVAL;
	do {
		count = take(stream, events, min_t(size_t, GGROUP_BATCH,
						   (size - done) / sizeof(*events)));
		if (count == -EAGAIN && !done && !(file->f_flags & O_NONBLOCK)) {
			count = wait_event_interruptible(stream->wait, readable(stream));
			if (!count)
				continue;
		}
		if (count < 0)
			break;
		if (copy_to_user(to + done, events, count * sizeof(*events))) {
			untake(stream, events, count);
			count = -EFAULT;
			break;
		}
		done += count * sizeof(*events);
	} while (size - done >= sizeof(*events));
	return done ?: count;
}

static __poll_t ggroup_stream_poll(struct file *file, poll_table *wait)
{
	struct ggroup_device *device = file->private_data;
	struct ggroup_stream *stream = &device->stream;
	__poll_t mask = 0;

	poll_wait(file, &stream->wait, wait);
	spin_lock_irq(&stream->lock);
	if (!list_empty(&stream->pending))
		mask |= EPOLLIN | EPOLLRDNORM;
	if (stream->gone)
		mask |= EPOLLERR | EPOLLHUP;
	spin_unlock_irq(&stream->lock);
	return mask;
}

/* End the listening. Listed events are of groups in the tree, so none is freed here. */
static void stop(struct ggroup_stream *stream)
{
	struct ggroup_pending *pending, *next;

	spin_lock_irq(&stream->lock);
	stream->open = false;
	list_for_each_entry_safe(pending, next, &stream->pending, node)
		drop(pending);
	spin_unlock_irq(&stream->lock);
}

static int ggroup_stream_release(struct inode *inode, struct file *file)
{
	struct ggroup_device *device = file->private_data;

	stop(&device->stream);
	ggroup_device_put(device);
	return 0;
}

static const struct file_operations ggroup_stream_fops = {
	.owner = THIS_MODULE,
	.read = ggroup_stream_read,
	.poll = ggroup_stream_poll,
	.release = ggroup_stream_release,
	.llseek = noop_llseek,
};

static int start(struct ggroup_stream *stream)
{
	int err = 0;

	spin_lock_irq(&stream->lock);
	if (stream->gone)
		err = -ENODEV;
	else if (stream->open)
		err = -EBUSY;
	else
		stream->open = true;
	spin_unlock_irq(&stream->lock);
	return err;
}

int ggroup_event_fd(struct ggroup_device *device, u32 flags, struct file **file)
{
	struct file *new;
	int fd, err;

	if (flags & ~(O_CLOEXEC | O_NONBLOCK))
		return -EINVAL;
	err = start(&device->stream);
	if (err)
		return err;
	fd = get_unused_fd_flags(flags & O_CLOEXEC);
	if (fd < 0) {
		stop(&device->stream);
		return fd;
	}
	new = anon_inode_getfile("[ggroup-events]", &ggroup_stream_fops,
				 ggroup_device_get(device), O_RDONLY | (flags & O_NONBLOCK));
	if (IS_ERR(new)) {
		put_unused_fd(fd);
		stop(&device->stream);
		ggroup_device_put(device);
		return PTR_ERR(new);
	}
	*file = new;
	return fd;
}
