// SPDX-License-Identifier: GPL-2.0
/* The books of a group: reading them, and writing its settings. */

#include <linux/lockdep.h>

#include "books.h"
#include "device.h"
#include "file.h"
#include "group.h"
#include "process.h"

static void get_levers(struct ggroup *group, struct ggroup_books *books)
{
	spinlock_t *lock = &group->device->queue.lock;

	spin_lock(lock);
	if (group->device->queue.online)
		books->flags |= GGROUP_BOOKS_ONLINE;
	if (group->levers[GGROUP_LEVER_RUNLIST].held)
		books->flags |= GGROUP_BOOKS_DETACHED;
	if (group->levers[GGROUP_LEVER_RUNLIST].held == GGROUP_RUNLIST_OFF_GR)
		books->flags |= GGROUP_BOOKS_DETACHED_GR;
	if (group->levers[GGROUP_LEVER_RUNLIST].doubtful)
		books->flags |= GGROUP_BOOKS_DOUBTFUL;
#define GGROUP_LEVER(name, bit, field)								\
	if (group->levers[GGROUP_LEVER_##bit].doubtful)						\
		books->flags |= GGROUP_BOOKS_DOUBTFUL;						\
	books->lever_##field = group->levers[GGROUP_LEVER_##bit].held;
#include "settings.def"
	spin_unlock(lock);
}

void ggroup_books_get(struct ggroup *group, const struct ggroup_file *file,
		      struct ggroup_books *books)
{
	lockdep_assert_held(&group->device->lock);
	/* A short lock, so that the figures are of one moment without holding up charges. */
	spin_lock(&group->device->figures);
	*books = (struct ggroup_books) {
		.id = group->id,
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)	.field = group->field,
#include "settings.def"
		.current_bytes = group->current_bytes,
		.peak = ggroup_peak_of(file, group, GGROUP_PEAK_GMEM),
		.swap = group->swap,
		.swapin_bytes = group->swapin_bytes,
		.swapout_bytes = group->swapout_bytes,
		.swapins = group->swapins,
		.swapouts = group->swapouts,
		.move_usec = group->move_usec,
		.events_low = atomic64_read(&group->events[GGROUP_EVENT_LOW]),
		.events_high = atomic64_read(&group->events[GGROUP_EVENT_HIGH]),
		.events_max = atomic64_read(&group->events[GGROUP_EVENT_MAX]),
		.events_oom = atomic64_read(&group->events[GGROUP_EVENT_OOM]),
		.events_reclaim = atomic64_read(&group->events[GGROUP_EVENT_RECLAIM]),
		.events_fail = atomic64_read(&group->events[GGROUP_EVENT_FAIL]),
		.uid = from_kuid(&init_user_ns, group->owner),
		.gid = from_kgid(&init_user_ns, group->gid),
		.parent = group->parent ? group->parent->id : 0,
		.swap_peak = ggroup_peak_of(file, group, GGROUP_PEAK_SWAP),
		.peak_ever = group->peaks[GGROUP_PEAK_GMEM].ever,
		.swap_peak_ever = group->peaks[GGROUP_PEAK_SWAP].ever,
		.off_all = group->off_all,
		.off_gr = group->off_gr,
		.events_oom_kill = atomic64_read(&group->events[GGROUP_EVENT_OOM_KILL]),
		.events_oom_group_kill =
			atomic64_read(&group->events[GGROUP_EVENT_OOM_GROUP_KILL]),
	};
	spin_unlock(&group->device->figures);
	ggroup_usermem_read(group, &books->pressure_bytes, &books->pressure_seq);
	ggroup_counters_read(group, &books->submitted, &books->finished);
	if (atomic_read(&group->joined))
		books->flags |= GGROUP_BOOKS_JOINED;
	if (ggroup_process_exited(group))
		books->flags |= GGROUP_BOOKS_DEAD;
	get_levers(group, books);
}

#define GGROUP_SET_OWNER	(GGROUP_SET_UID | GGROUP_SET_GID)

/* The bits of all settings, and of those that only slices have. */
#define OF_ANY(bit)	0
#define OF_SLICE(bit)	GGROUP_SET_##bit
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)	| GGROUP_SET_##bit
static const u64 all_settings = GGROUP_SET_OWNER
#include "settings.def"
;
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)	| OF_##kinds(bit)
static const u64 slice_settings = GGROUP_SET_OWNER
#include "settings.def"
;

u64 ggroup_books_settings(void)
{
	return all_settings;
}

static bool is_within(u64 value, u64 least, u64 most)
{
	return value >= least && value <= most;
}

static int check_set(const struct ggroup *group, const struct ggroup_set *set, bool admin)
{
	u64 mask = set->mask;

	if (!group->parent)
		return -EPERM;
	if (mask & ~all_settings)
		return -EINVAL;
	if ((mask & slice_settings) && group->kind != GGROUP_KIND_SLICE)
		return -EINVAL;
	if ((mask & GGROUP_SET_OWNER) && !admin)
		return -EPERM;
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)				\
	if ((mask & GGROUP_SET_##bit) && !is_within(set->field, least, most))			\
		return -ERANGE;
#include "settings.def"
	if (((mask & GGROUP_SET_UID) && !uid_valid(make_kuid(&init_user_ns, set->uid))) ||
	    ((mask & GGROUP_SET_GID) && !gid_valid(make_kgid(&init_user_ns, set->gid))))
		return -ERANGE;
	return 0;
}

int ggroup_books_set(struct ggroup *group, const struct ggroup_set *set, bool admin)
{
	int err;

	lockdep_assert_held_write(&group->device->lock);
	err = check_set(group, set, admin);
	if (err)
		return err;
#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)				\
	if (set->mask & GGROUP_SET_##bit)							\
		group->field = set->field;
#include "settings.def"
	if (set->mask & GGROUP_SET_UID)
		group->owner = make_kuid(&init_user_ns, set->uid);
	if (set->mask & GGROUP_SET_GID)
		group->gid = make_kgid(&init_user_ns, set->gid);
	return 0;
}

#define GGROUP_REASONS	(GGROUP_REASON_FREEZE | GGROUP_REASON_TURN | GGROUP_REASON_QUOTA | \
			 GGROUP_REASON_BUSY | GGROUP_REASON_GANG | GGROUP_REASON_MIGRATION)

int ggroup_books_set_reasons(struct ggroup *group, const struct ggroup_reasons *reasons)
{
	lockdep_assert_held_write(&group->device->lock);
	if (group->kind != GGROUP_KIND_PROCESS)
		return -EINVAL;
	if ((reasons->off_all | reasons->off_gr) & ~GGROUP_REASONS)
		return -EINVAL;
	if (reasons->off_all & reasons->off_gr)
		return -EINVAL;
	group->off_all = reasons->off_all;
	group->off_gr = reasons->off_gr;
	return 0;
}
