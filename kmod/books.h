/* SPDX-License-Identifier: GPL-2.0 */
/* The books of a group: reading them, and writing its settings. */
#ifndef GGROUP_BOOKS_H
#define GGROUP_BOOKS_H

#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;
struct ggroup_file;

/**
 * ggroup_books_get() - get the books of a group
 * @group: the group
 * @file: the file that the peaks are for
 * @books: written as a whole
 *
 * Context: the device's lock is held.
 */
void ggroup_books_get(struct ggroup *group, const struct ggroup_file *file,
		      struct ggroup_books *books);

/**
 * ggroup_books_settings() - get the settings that ggroup_books_set() takes
 *
 * Return: GGROUP_SET_*.
 */
u64 ggroup_books_settings(void);

/**
 * ggroup_books_set() - write settings of a group
 * @group: the group
 * @set: the values, as the ABI has them
 * @admin: the caller may set a slice's owner, too
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
 * Return: 0, or -EINVAL for a group that is no process, or an impossible set.
 */
int ggroup_books_set_reasons(struct ggroup *group, const struct ggroup_reasons *reasons);

#endif
