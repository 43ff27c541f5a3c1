/* SPDX-License-Identifier: GPL-2.0 */
/* The number of files that one user has open, bounded so that no user can use up kernel memory. */
#ifndef GGROUP_USER_H
#define GGROUP_USER_H

struct ggroup_user;

/**
 * ggroup_user_open() - count one more file of the calling user
 *
 * Return: the user, for ggroup_user_close(); ERR_PTR(-EMFILE) or ERR_PTR(-ENOMEM).
 */
struct ggroup_user *ggroup_user_open(void);

/**
 * ggroup_user_close() - count one file less
 * @user: the user
 */
void ggroup_user_close(struct ggroup_user *user);

#endif
