// SPDX-License-Identifier: GPL-2.0
/*
 * usermemfd: a single record, which the next one replaces, so a program that does not read costs
 * nothing and misses nothing.
 */

#include <linux/anon_inodes.h>
#include <linux/err.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/poll.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "event.h"
#include "group.h"
#include "user.h"
#include "usermem.h"

/**
 * struct ggroup_reader - an open usermemfd
 * @group: its group, with a reference
 * @seen: the latest record that was read, under the lock of the group's usermem
 * @user: the user that it is counted for
 */
struct ggroup_reader {
	struct ggroup *group;
	u64 seen;
	struct ggroup_user *user;
};

void ggroup_usermem_init(struct ggroup_usermem *usermem)
{
	spin_lock_init(&usermem->lock);
	init_waitqueue_head(&usermem->wait);
}

void ggroup_usermem_press(struct ggroup *group, u64 nbytes)
{
	struct ggroup_usermem *usermem = &group->usermem;
	unsigned long flags;
	bool gone;

	spin_lock_irqsave(&usermem->lock, flags);
	gone = usermem->gone;
	if (!gone) {
		usermem->nbytes = nbytes;
		usermem->seq++;
		wake_up_interruptible_poll(&usermem->wait, EPOLLIN | EPOLLRDNORM);
	}
	spin_unlock_irqrestore(&usermem->lock, flags);
	if (!gone)
		ggroup_event_tell(group, GGROUP_CHANNEL_USERMEM);
}

void ggroup_usermem_read(struct ggroup *group, u64 *nbytes, u64 *seq)
{
	struct ggroup_usermem *usermem = &group->usermem;

	spin_lock_irq(&usermem->lock);
	*nbytes = usermem->nbytes;
	*seq = usermem->seq;
	spin_unlock_irq(&usermem->lock);
}

void ggroup_usermem_gone(struct ggroup *group)
{
	struct ggroup_usermem *usermem = &group->usermem;

	spin_lock_irq(&usermem->lock);
	usermem->gone = true;
	wake_up_interruptible_poll(&usermem->wait, EPOLLERR | EPOLLHUP);
	spin_unlock_irq(&usermem->lock);
}

/* The file */

/* Take the record if it is unread: of two simultaneous readers, one gets it. */
static int take(struct ggroup_reader *reader, struct ggroup_pressure *record, u64 *before)
{
	struct ggroup_usermem *usermem = &reader->group->usermem;
	int err = 0;

	spin_lock_irq(&usermem->lock);
	*before = reader->seen;
	if (usermem->gone) {
		err = -ENODEV;
	} else if (reader->seen == usermem->seq) {
		err = -EAGAIN;
	} else {
		record->nbytes = usermem->nbytes;
		record->seq = usermem->seq;
		reader->seen = usermem->seq;
	}
	spin_unlock_irq(&usermem->lock);
	return err;
}

/*
 * Put back a record that could not be copied to the program, unless a later one was read meanwhile.
 */
static void untake(struct ggroup_reader *reader, const struct ggroup_pressure *record, u64 before)
{
	struct ggroup_usermem *usermem = &reader->group->usermem;

	spin_lock_irq(&usermem->lock);
	if (reader->seen == record->seq) {
		reader->seen = before;
		wake_up_interruptible_poll(&usermem->wait, EPOLLIN | EPOLLRDNORM);
	}
	spin_unlock_irq(&usermem->lock);
}

static __poll_t look(struct ggroup_reader *reader)
{
	struct ggroup_usermem *usermem = &reader->group->usermem;
	__poll_t mask = 0;

	spin_lock_irq(&usermem->lock);
	if (usermem->gone)
		mask = EPOLLERR | EPOLLHUP;
	else if (reader->seen != usermem->seq)
		mask = EPOLLIN | EPOLLRDNORM;
	spin_unlock_irq(&usermem->lock);
	return mask;
}

static ssize_t ggroup_reader_read(struct file *file, char __user *to, size_t size, loff_t *offset)
{
	struct ggroup_reader *reader = file->private_data;
	struct ggroup_pressure record;
	u64 before;
	int err;

	if (size < sizeof(record))
		return -EINVAL;
	while ((err = take(reader, &record, &before)) == -EAGAIN) {
		if (file->f_flags & O_NONBLOCK)
			break;
		err = wait_event_interruptible(reader->group->usermem.wait, look(reader));
		if (err)
			break;
	}
	if (err)
		return err;
	if (!copy_to_user(to, &record, sizeof(record)))
		return sizeof(record);
	untake(reader, &record, before);
	return -EFAULT;
}

static __poll_t ggroup_reader_poll(struct file *file, poll_table *wait)
{
	struct ggroup_reader *reader = file->private_data;

	poll_wait(file, &reader->group->usermem.wait, wait);
	return look(reader);
}

static void free_reader(struct ggroup_reader *reader)
{
	ggroup_user_close(reader->user);
	ggroup_group_put(reader->group);
	kfree(reader);
}

static int ggroup_reader_release(struct inode *inode, struct file *file)
{
	free_reader(file->private_data);
	return 0;
}

static const struct file_operations ggroup_reader_fops = {
	.owner = THIS_MODULE,
	.read = ggroup_reader_read,
	.poll = ggroup_reader_poll,
	.release = ggroup_reader_release,
	.llseek = noop_llseek,
};

static struct ggroup_reader *new_reader(struct ggroup *group)
{
	struct ggroup_reader *reader = kzalloc(sizeof(*reader), GFP_KERNEL_ACCOUNT);
	struct ggroup_user *user;
	u64 unused;

	if (!reader)
		return ERR_PTR(-ENOMEM);
	user = ggroup_user_open();
	if (IS_ERR(user)) {
		kfree(reader);
		return ERR_CAST(user);
	}
	reader->user = user;
	reader->group = ggroup_group_get(group);
	ggroup_usermem_read(group, &unused, &reader->seen);
	return reader;
}

int ggroup_usermem_fd(struct ggroup *group, u32 flags, struct file **file)
{
	struct ggroup_reader *reader;
	struct file *new;
	int fd;

	if (flags & ~(O_CLOEXEC | O_NONBLOCK))
		return -EINVAL;
	if (!READ_ONCE(group->alive))
		return -ENODEV;
	reader = new_reader(group);
	if (IS_ERR(reader))
		return PTR_ERR(reader);
	fd = get_unused_fd_flags(flags & O_CLOEXEC);
	if (fd < 0) {
		free_reader(reader);
		return fd;
	}
	new = anon_inode_getfile("[ggroup-usermem]", &ggroup_reader_fops, reader,
				 O_RDONLY | (flags & O_NONBLOCK));
	if (IS_ERR(new)) {
		put_unused_fd(fd);
		free_reader(reader);
		return PTR_ERR(new);
	}
	*file = new;
	return fd;
}
