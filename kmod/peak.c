// SPDX-License-Identifier: GPL-2.0
/*
 * Peaks, as memory.peak has them since Linux 6.12: a reset is of one open file, and does not affect
 * other files. A group has one peak since the last reset by any file; each file that has reset it
 * keeps the peak before that in a mark of its own. So a charge costs the same however many files
 * have.
 */

#include <linux/lockdep.h>
#include <linux/minmax.h>
#include <linux/slab.h>
#include <linux/spinlock.h>

#include "device.h"
#include "file.h"
#include "group.h"
#include "peak.h"

/**
 * struct ggroup_mark - a file's reset of a group's peaks
 * @of_group: in the list of the group
 * @of_file: in the list of the file
 * @file: the file
 * @group: the group, which is in the tree, since it takes its marks with it
 * @counted: it counts for the bound on marks
 * @highest: peaks from its own reset to the last reset by any file; see the device's @figures
 */
struct ggroup_mark {
	struct list_head of_group;
	struct list_head of_file;
	const struct ggroup_file *file;
	struct ggroup *group;
	bool counted;
	u64 highest[GGROUP_PEAKS];
};

/* Protects both lists, of all groups and files. Inside the figures of a device, a leaf. */
static DEFINE_SPINLOCK(marks_lock);

static struct ggroup_mark *find(const struct ggroup_file *file, const struct ggroup *group)
{
	struct ggroup_mark *mark;

	lockdep_assert_held(&marks_lock);
	list_for_each_entry(mark, &group->marks, of_group)
		if (mark->file == file)
			return mark;
	return NULL;
}

static int enter(struct ggroup_mark *mark, struct ggroup_file *file, struct ggroup *group)
{
	lockdep_assert_held(&marks_lock);
	if (!group->alive)
		return -ENODEV;
	if (mark->counted && group->marks_counted >= GGROUP_RESETS_MOST)
		return -EMFILE;
	group->marks_counted += mark->counted;
	mark->file = file;
	mark->group = group;
	for (u32 i = 0; i < GGROUP_PEAKS; i++)
		mark->highest[i] = group->peaks[i].ever;
	list_add(&mark->of_group, &group->marks);
	list_add(&mark->of_file, &file->marks);
	return 0;
}

static void drop(struct ggroup_mark *mark)
{
	lockdep_assert_held(&marks_lock);
	mark->group->marks_counted -= mark->counted;
	list_del(&mark->of_group);
	list_del(&mark->of_file);
	kfree(mark);
}

static void start_again(struct ggroup_mark *mark, u32 what)
{
	struct ggroup *group = mark->group;
	struct ggroup_peak *peak = &group->peaks[what];
	struct ggroup_mark *other;

	lockdep_assert_held(&marks_lock);
	list_for_each_entry(other, &group->marks, of_group)
		other->highest[what] = max(other->highest[what], peak->since);
	mark->highest[what] = 0;
	peak->since = what == GGROUP_PEAK_SWAP ? group->swap : group->current_bytes;
}

int ggroup_peak_reset(struct ggroup_file *file, struct ggroup *group, u32 what, bool admin)
{
	/* Before any lock: a caller without memory left must not make others wait. */
	struct ggroup_mark *fresh = kzalloc(sizeof(*fresh), GFP_KERNEL_ACCOUNT), *mark;
	struct ggroup_device *device = group->device;
	int err = 0;

	if (!fresh)
		return -ENOMEM;
	fresh->counted = !admin;
	down_read(&device->lock);
	spin_lock(&device->figures);
	spin_lock(&marks_lock);
	mark = find(file, group);
	if (!mark) {
		err = enter(fresh, file, group);
		if (!err) {
			mark = fresh;
			fresh = NULL;
		}
	}
	if (!err)
		start_again(mark, what);
	spin_unlock(&marks_lock);
	spin_unlock(&device->figures);
	up_read(&device->lock);
	kfree(fresh);
	return err;
}

u64 ggroup_peak_of(const struct ggroup_file *file, const struct ggroup *group, u32 what)
{
	const struct ggroup_peak *peak = &group->peaks[what];
	const struct ggroup_mark *mark;
	u64 highest;

	lockdep_assert_held(&group->device->figures);
	/* A mark of this file was made before this call; marks of other files do not matter. */
	if (list_empty(&group->marks))
		return peak->ever;
	spin_lock(&marks_lock);
	mark = find(file, group);
	highest = mark ? max(mark->highest[what], peak->since) : peak->ever;
	spin_unlock(&marks_lock);
	return highest;
}

void ggroup_peak_leave(struct ggroup *group)
{
	struct ggroup_mark *mark, *next;

	lockdep_assert_held_write(&group->device->lock);
	spin_lock(&marks_lock);
	list_for_each_entry_safe(mark, next, &group->marks, of_group)
		drop(mark);
	spin_unlock(&marks_lock);
}

void ggroup_peak_close(struct ggroup_file *file)
{
	struct ggroup_mark *mark, *next;

	spin_lock(&marks_lock);
	list_for_each_entry_safe(mark, next, &file->marks, of_file)
		drop(mark);
	spin_unlock(&marks_lock);
}
