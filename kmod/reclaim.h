/* SPDX-License-Identifier: GPL-2.0 */
/* Reclaim: has memory taken, and the workers that do when nobody asked. */
#ifndef GGROUP_RECLAIM_H
#define GGROUP_RECLAIM_H

#include <linux/types.h>

struct ggroup;
struct work_struct;

/* Has @nbytes taken below @top by the provider, and waits for it; *@moved is how much it was. */
int ggroup_reclaim(struct ggroup *top, u64 nbytes, u32 timeout_ms, u64 *moved);

/* The worker of a group: brings it back under its high. */
void ggroup_reclaim_work(struct work_struct *work);
/* Wakes it, if there is something for it to do. With the device's lock held. */
void ggroup_reclaim_wake(struct ggroup *group);

int ggroup_reclaim_init(void);
void ggroup_reclaim_exit(void);

#endif
