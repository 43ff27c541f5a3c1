/* SPDX-License-Identifier: GPL-2.0 */
/* The register of GPUs. */
#ifndef GGROUP_REGISTER_H
#define GGROUP_REGISTER_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup_device;
struct ggroup_file;

/**
 * ggroup_register_find() - look a GPU up
 * @uuid: its UUID
 *
 * Return: the GPU, with a reference; NULL for none.
 */
struct ggroup_device *ggroup_register_find(const char *uuid);

/**
 * ggroup_register_enter() - make a file the provider of a GPU, opening its books where necessary
 * @file: a file that is neither a tenant's nor a provider's, with its @bind held
 * @arg: as GGROUP_IOC_REGISTER has it
 *
 * Return: 0, -EBUSY, -ENOSPC or -ENOMEM.
 */
int ggroup_register_enter(struct ggroup_file *file, struct ggroup_gpu *arg);

/**
 * ggroup_register_leave() - stop a file from being the provider of its GPU
 * @file: a provider's, with its @bind held, or in its release
 * @flags: GGROUP_UNREGISTER_*
 */
void ggroup_register_leave(struct ggroup_file *file, u32 flags);

/**
 * ggroup_register_forget() - close the books of a GPU
 * @uuid: its UUID
 *
 * Return: 0, -ENODEV, or -EBUSY for one with a provider.
 */
int ggroup_register_forget(const char *uuid);

/**
 * ggroup_register_exit() - close all books, as the module is unloaded; no file is open any more
 */
void ggroup_register_exit(void);

#endif
