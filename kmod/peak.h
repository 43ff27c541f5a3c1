/* SPDX-License-Identifier: GPL-2.0 */
/* The most that a group held, for each file that asks since that one asked. */
#ifndef GGROUP_PEAK_H
#define GGROUP_PEAK_H

#include <linux/list.h>
#include <linux/types.h>

#include "uapi/ggroup.h"

struct ggroup;
struct ggroup_file;

#define GGROUP_PEAKS	(GGROUP_PEAK_SWAP + 1)

/**
 * struct ggroup_peak - the highest value of a figure; see the device's @figures
 * @since: since the last reset of anybody
 * @ever: since the group came
 */
struct ggroup_peak {
	u64 since;
	u64 ever;
};

/* The figure is now that. */
static inline void ggroup_peak_see(struct ggroup_peak *peak, u64 figure)
{
	if (figure <= peak->since)
		return;
	peak->since = figure;
	if (figure > peak->ever)
		peak->ever = figure;
}

/*
 * From now on the file knows of nothing that was before; all others go on. -ENODEV, -EMFILE for too
 * many files of others than an @admin, -ENOMEM.
 */
int ggroup_peak_reset(struct ggroup_file *file, struct ggroup *group, u32 what, bool admin);
/* As that file knows it. With the device's lock and its figures held. */
u64 ggroup_peak_of(const struct ggroup_file *file, const struct ggroup *group, u32 what);
/* The group leaves the tree: with the device's lock held for writing. */
void ggroup_peak_leave(struct ggroup *group);
/* The file is closed. */
void ggroup_peak_close(struct ggroup_file *file);

#endif
