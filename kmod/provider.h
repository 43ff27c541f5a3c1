/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The provider: a program that moves the hardware. It reads commands and writes answers, as the
 * servers of ublk and FUSE do.
 */
#ifndef GGROUP_PROVIDER_H
#define GGROUP_PROVIDER_H

#include <linux/fs.h>
#include <linux/poll.h>
#include <linux/types.h>

struct ggroup_device;
struct ggroup_file;

/**
 * ggroup_provider_come() - make a file the provider of a GPU
 * @device: the GPU
 * @file: the file
 *
 * Every lever that is not in its initial state, or is in doubt, is commanded again.
 *
 * Context: the device's lock is held for writing.
 * Return: false where there is a provider already.
 */
bool ggroup_provider_come(struct ggroup_device *device, const struct ggroup_file *file);

/**
 * ggroup_provider_go() - take a GPU's provider away
 * @device: the GPU
 * @released: the provider gave everything back: nothing is held and nothing is in doubt
 *
 * Waiting callers get -ENODEV; levers that the provider had not answered for are in doubt.
 *
 * Context: the device's lock is held for writing.
 */
void ggroup_provider_go(struct ggroup_device *device, bool released);

/**
 * ggroup_provider_read() - do read() of a file that registered, now or before
 * @file: the file
 * @to: buffer for whole messages
 * @size: its size, in bytes
 * @nonblock: return -EAGAIN rather than wait for a command
 *
 * Return: bytes, -EINVAL, -EAGAIN, -ENODEV, -EFAULT or -ERESTARTSYS.
 */
ssize_t ggroup_provider_read(struct ggroup_file *file, char __user *to, size_t size, bool nonblock);

/**
 * ggroup_provider_write() - do write() of a file that registered, now or before
 * @file: the file
 * @from: whole messages
 * @size: their size, in bytes
 *
 * Return: bytes of the answers taken, -EINVAL, -ENODEV or -EFAULT.
 */
ssize_t ggroup_provider_write(struct ggroup_file *file, const char __user *from, size_t size);

/**
 * ggroup_provider_poll() - do poll() of a file that registered, now or before
 * @file: the file
 * @filp: the same, as the kernel has it
 * @wait: the poll table
 *
 * Return: EPOLLIN for a command to read; EPOLLHUP for a former provider.
 */
__poll_t ggroup_provider_poll(struct ggroup_file *file, struct file *filp, poll_table *wait);

#endif
