// SPDX-License-Identifier: GPL-2.0
/* What is known about a group, and what can be set on it. */

#include <linux/lockdep.h>

#include "exit.h"
#include "group.h"

static void get_levers(struct ggroup *group, struct ggroup_books *books)
{
	spinlock_t *lock = &group->device->queue.lock;

	spin_lock(lock);
	if (group->device->queue.online)
		books->flags |= GGROUP_BOOKS_ONLINE;
	if (group->levers[GGROUP_LEVER_RUNLIST].held)
		books->flags |= GGROUP_BOOKS_DETACHED;
	if (group->levers[GGROUP_LEVER_RUNLIST].doubtful ||
	    group->levers[GGROUP_LEVER_TIMESLICE].doubtful)
		books->flags |= GGROUP_BOOKS_DOUBTFUL;
	books->lever_timeslice_us = group->levers[GGROUP_LEVER_TIMESLICE].held;
	spin_unlock(lock);
}

void ggroup_get_books(struct ggroup *group, struct ggroup_books *books)
{
	lockdep_assert_held(&group->device->lock);
	/* So they are of one moment, and nobody waits for who looks. */
	spin_lock(&group->device->figures);
	*books = (struct ggroup_books) {
		.id = group->id,
		.high = group->high,
		.low = group->low,
		.swap_max = group->swap_max,
		.current_bytes = group->current_bytes,
		.peak = group->peak,
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
		.timeslice_us = group->timeslice_us,
		.frozen = group->frozen,
		.priority = group->priority,
		.weight = group->weight,
		.kept = group->kept,
		.uid = from_kuid(&init_user_ns, group->owner),
		.gid = from_kgid(&init_user_ns, group->gid),
		.parent = group->parent ? group->parent->id : 0,
	};
	spin_unlock(&group->device->figures);
	ggroup_usermem_read(group, &books->pressure_bytes, &books->pressure_seq);
	ggroup_counters_read(group, &books->submitted, &books->finished);
	if (atomic_read(&group->joined))
		books->flags |= GGROUP_BOOKS_JOINED;
	if (ggroup_exited(group))
		books->flags |= GGROUP_BOOKS_DEAD;
	get_levers(group, books);
}

#define GGROUP_SET_SLICE	(GGROUP_SET_KEPT | GGROUP_SET_UID | GGROUP_SET_GID)
#define GGROUP_SET_ALL		((GGROUP_SET_GID << 1) - 1)

static int check_set(const struct ggroup *group, const struct ggroup_set *set, bool admin)
{
	u64 mask = set->mask;

	if (!group->parent)
		return -EPERM;
	if (mask & ~GGROUP_SET_ALL)
		return -EINVAL;
	if ((mask & GGROUP_SET_SLICE) && group->kind != GGROUP_KIND_SLICE)
		return -EINVAL;
	if ((mask & (GGROUP_SET_UID | GGROUP_SET_GID)) && !admin)
		return -EPERM;
	if (((mask & GGROUP_SET_HIGH) && set->high > GGROUP_MAX) ||
	    ((mask & GGROUP_SET_LOW) && set->low > GGROUP_MAX) ||
	    ((mask & GGROUP_SET_SWAP_MAX) && set->swap_max > GGROUP_MAX) ||
	    ((mask & GGROUP_SET_TIMESLICE) && set->timeslice_us > GGROUP_MAX) ||
	    ((mask & GGROUP_SET_FROZEN) && set->frozen > 1) ||
	    ((mask & GGROUP_SET_PRIORITY) && set->priority > GGROUP_PRIORITY_MOST) ||
	    ((mask & GGROUP_SET_WEIGHT) && (!set->weight || set->weight > GGROUP_WEIGHT_MOST)) ||
	    ((mask & GGROUP_SET_KEPT) && set->kept > 1))
		return -ERANGE;
	if (((mask & GGROUP_SET_UID) && !uid_valid(make_kuid(&init_user_ns, set->uid))) ||
	    ((mask & GGROUP_SET_GID) && !gid_valid(make_kgid(&init_user_ns, set->gid))))
		return -ERANGE;
	return 0;
}

int ggroup_set(struct ggroup *group, const struct ggroup_set *set, bool admin)
{
	int err = check_set(group, set, admin);

	if (err)
		return err;
	if (set->mask & GGROUP_SET_HIGH)
		group->high = set->high;
	if (set->mask & GGROUP_SET_LOW)
		group->low = set->low;
	if (set->mask & GGROUP_SET_SWAP_MAX)
		group->swap_max = set->swap_max;
	if (set->mask & GGROUP_SET_TIMESLICE)
		group->timeslice_us = set->timeslice_us;
	if (set->mask & GGROUP_SET_FROZEN)
		group->frozen = set->frozen;
	if (set->mask & GGROUP_SET_PRIORITY)
		group->priority = set->priority;
	if (set->mask & GGROUP_SET_WEIGHT)
		group->weight = set->weight;
	if (set->mask & GGROUP_SET_KEPT)
		group->kept = set->kept;
	if (set->mask & GGROUP_SET_UID)
		group->owner = make_kuid(&init_user_ns, set->uid);
	if (set->mask & GGROUP_SET_GID)
		group->gid = make_kgid(&init_user_ns, set->gid);
	return 0;
}
