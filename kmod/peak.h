/* SPDX-License-Identifier: GPL-2.0 */
/* The most that a group held: for each file, since its own reset. */
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
 * @since: since the last reset by any file
 * @ever: since the group came
 */
struct ggroup_peak {
	u64 since;
	u64 ever;
};

/**
 * ggroup_peak_see() - have a peak follow its figure
 * @peak: the peak
 * @figure: current value of the figure
 *
 * Context: as for the figure; see the device's @figures.
 */
static inline void ggroup_peak_see(struct ggroup_peak *peak, u64 figure)
{
	if (figure <= peak->since)
		return;
	peak->since = figure;
	if (figure > peak->ever)
		peak->ever = figure;
}

/**
 * ggroup_peak_reset() - start a peak anew for one file; other files' peaks stay as they are
 * @file: the file
 * @group: the group
 * @what: GGROUP_PEAK_*
 * @admin: the file is not bounded
 *
 * Return: 0, -ENODEV, -EMFILE for too many files, -ENOMEM.
 */
int ggroup_peak_reset(struct ggroup_file *file, struct ggroup *group, u32 what, bool admin);

/**
 * ggroup_peak_of() - get a peak as a file sees it
 * @file: the file
 * @group: the group
 * @what: GGROUP_PEAK_*
 *
 * Context: the device's lock and its figures are held.
 * Return: bytes.
 */
u64 ggroup_peak_of(const struct ggroup_file *file, const struct ggroup *group, u32 what);

/**
 * ggroup_peak_leave() - drop all marks of a group that leaves the tree
 * @group: the group
 *
 * Context: the device's lock is held for writing.
 */
void ggroup_peak_leave(struct ggroup *group);

/**
 * ggroup_peak_close() - drop all marks of a file that is closed
 * @file: the file
 */
void ggroup_peak_close(struct ggroup_file *file);

#endif
