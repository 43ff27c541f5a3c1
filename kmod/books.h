/* SPDX-License-Identifier: GPL-2.0 */
/* What is known of a group, and what can be set on it. */
#ifndef GGROUP_BOOKS_H
#define GGROUP_BOOKS_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;
struct ggroup_file;

/**
 * ggroup_books_get() - say what is known of a group
 * @group: the group
 * @file: the file whose peaks they are
 * @books: written whole
 *
 * Context: the device's lock is held.
 */
void ggroup_books_get(struct ggroup *group, const struct ggroup_file *file,
		      struct ggroup_books *books);

/**
 * ggroup_books_settings() - say what ggroup_books_set() takes
 *
 * Return: GGROUP_SET_*.
 */
u64 ggroup_books_settings(void);

/**
 * ggroup_books_set() - set what can be set on a group
 * @group: the group
 * @set: what, as the ABI has it
 * @admin: the caller may say whose a slice is, too
 *
 * Context: the device's lock is held for writing.
 * Return: 0, -EPERM, -EINVAL or -ERANGE.
 */
int ggroup_books_set(struct ggroup *group, const struct ggroup_set *set, bool admin);

/**
 * ggroup_books_set_reasons() - set why a process is off the runlist
 * @group: the group
 * @reasons: the whole set, as the ABI has it
 *
 * Context: the device's lock is held for writing.
 * Return: 0, or -EINVAL for what is no process, or for a set that cannot be.
 */
int ggroup_books_set_reasons(struct ggroup *group, const struct ggroup_reasons *reasons);

#endif
