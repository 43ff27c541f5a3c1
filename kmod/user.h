/* SPDX-License-Identifier: GPL-2.0 */
/* What one user can have open: nobody can use up the kernel's memory for all others. */
#ifndef GGROUP_USER_H
#define GGROUP_USER_H

struct ggroup_user;

/* Counts one more file of the caller's user. ERR_PTR(-EMFILE) for too many, ERR_PTR(-ENOMEM). */
struct ggroup_user *ggroup_user_open(void);
void ggroup_user_close(struct ggroup_user *user);

#endif
