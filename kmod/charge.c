// SPDX-License-Identifier: GPL-2.0
/*
 * The figures. What happens often, charge and uncharge, adds to atomic figures with the device's
 * lock held for reading, as mm/page_counter.c does; what has to look at more than one figure to
 * decide holds it for writing.
 */

#include <linux/mm.h>

#include "charge.h"
#include "group.h"
#include "plan.h"
#include "reclaim.h"
#include "trace.h"

/* A larger charge goes the slow way, so that additions in flight can never overflow a figure. */
#define GGROUP_FAST_MOST	BIT_ULL(46)

static int check(const struct ggroup *group, u64 nbytes)
{
	if (!group->alive)
		return -ENODEV;
	if (group->kind != GGROUP_KIND_PROCESS || nbytes > GGROUP_MAX)
		return -EINVAL;
	return 0;
}

/*
 * A program says by itself what it has, so what it says has a bound: else one that says 2^62 takes
 * all there is to count from its neighbours, until the driver's figure corrects it. Charges that
 * come at the same moment may each find room, so the bound may be passed by as many.
 */
static int check_charge(struct ggroup *group, u64 nbytes, bool tenant)
{
	u64 most, has;
	int err = check(group, nbytes);

	if (err || !tenant)
		return err;
	most = min(group->device->root->high, GGROUP_MAX / GGROUP_OVERCOMMIT) * GGROUP_OVERCOMMIT;
	has = atomic64_read(&group->current_bytes) + atomic64_read(&group->swap);
	return nbytes > most || has > most - nbytes ? -ENOMEM : 0;
}

static void raise_peak(struct ggroup *group)
{
	s64 now = atomic64_read(&group->current_bytes);
	s64 peak = atomic64_read(&group->peak);

	while (now > peak && !atomic64_try_cmpxchg(&group->peak, &peak, now))
		;
}

void ggroup_shift(struct ggroup *group, s64 held, s64 swapped)
{
	struct ggroup *level;

	for (level = group; level; level = level->parent) {
		atomic64_add(held, &level->current_bytes);
		atomic64_add(swapped, &level->swap);
		raise_peak(level);
	}
}

void ggroup_count(struct ggroup *group, unsigned int event)
{
	struct ggroup *level;

	for (level = group; level; level = level->parent) {
		atomic64_inc(&level->events[event]);
		ggroup_tell(level, GGROUP_CHANNEL_GMEM);
	}
}

static void sub_from_all(struct ggroup *group, u64 nbytes)
{
	struct ggroup *level;

	for (level = group; level; level = level->parent)
		atomic64_sub(nbytes, &level->current_bytes);
}

/* Adds to one level; notes where that leaves it. */
static __always_inline void add_to(struct ggroup *level, u64 nbytes, bool *over, bool *higher)
{
	s64 now = atomic64_add_return(nbytes, &level->current_bytes);

	/* Unsigned: what is in flight may lift a figure over GGROUP_MAX, for a moment. */
	*over |= (u64)now > level->high;
	*higher |= now > atomic64_read(&level->peak);
}

/*
 * Adds above first and to the process last, and is undone in the other order: so at no moment
 * does a group hold less than what is below it, whoever looks. Peaks are raised once nothing can
 * be undone any more, and mostly there are none to raise.
 */
static bool charge_fast(struct ggroup *group, u64 nbytes, bool tenant)
{
	bool over = false, higher = false;
	struct ggroup *level;

	for (level = group->parent; level; level = level->parent)
		add_to(level, nbytes, &over, &higher);
	add_to(group, nbytes, &over, &higher);
	if (unlikely(over)) {
		sub_from_all(group, nbytes);
		return false;
	}
	if (unlikely(higher))
		for (level = group; level; level = level->parent)
			raise_peak(level);
	if (tenant && group->device->headroom)
		ggroup_reclaim_wake(group);
	return true;
}

/* Some level may end up over its high: fine, unless nothing can bring it back. */
static int charge_slow(struct ggroup *group, u64 nbytes, bool tenant)
{
	struct ggroup *level;

	for (level = group; level; level = level->parent) {
		u64 now = atomic64_read(&level->current_bytes) + nbytes;

		if (now <= level->high)
			continue;
		if (now > GGROUP_MAX ||
		    !ggroup_reclaimable(level, group, nbytes, now - level->high)) {
			ggroup_count(level, GGROUP_EVENT_MAX);
			ggroup_count(group, GGROUP_EVENT_OOM);
			return -ENOMEM;
		}
	}
	ggroup_shift(group, nbytes, 0);
	for (level = group; level; level = level->parent) {
		u64 now = atomic64_read(&level->current_bytes);

		if (now > level->high)
			trace_ggroup_over_high(level->id, now, level->high);
	}
	if (tenant)
		ggroup_reclaim_wake(group);
	return 0;
}

int ggroup_charge(struct ggroup *group, u64 nbytes, bool tenant)
{
	struct ggroup_device *device = group->device;
	bool done = false;
	int err;

	down_read(&device->lock);
	err = check_charge(group, nbytes, tenant);
	if (!err && nbytes <= GGROUP_FAST_MOST)
		done = charge_fast(group, nbytes, tenant);
	up_read(&device->lock);
	if (!err && !done) {
		down_write(&device->lock);
		err = check_charge(group, nbytes, tenant);
		if (!err)
			err = charge_slow(group, nbytes, tenant);
		up_write(&device->lock);
	}
	trace_ggroup_charge(group->id, nbytes, err);
	return err;
}

/* Takes from a figure what is there to take. */
static bool take(atomic64_t *figure, u64 nbytes)
{
	s64 now = atomic64_read(figure);

	do {
		if ((u64)now < nbytes)
			return false;
	} while (!atomic64_try_cmpxchg(figure, &now, now - (s64)nbytes));
	return true;
}

int ggroup_uncharge(struct ggroup *group, u64 nbytes)
{
	int err;

	down_read(&group->device->lock);
	err = check(group, nbytes);
	if (!err && !take(&group->current_bytes, nbytes))
		err = -EINVAL;
	if (!err)
		sub_from_all(group->parent, nbytes);
	up_read(&group->device->lock);
	return err;
}

int ggroup_uncharge_swap(struct ggroup *group, u64 nbytes)
{
	struct ggroup *level;
	int err;

	down_read(&group->device->lock);
	err = check(group, nbytes);
	if (!err && !take(&group->swap, nbytes))
		err = -EINVAL;
	if (!err)
		for (level = group->parent; level; level = level->parent)
			atomic64_sub(nbytes, &level->swap);
	up_read(&group->device->lock);
	return err;
}

static int swap_out(struct ggroup *group, u64 nbytes, u64 usec)
{
	struct ggroup *level;

	if (nbytes > (u64)atomic64_read(&group->current_bytes))
		return -EINVAL;
	for (level = group; level; level = level->parent) {
		u64 swap = atomic64_read(&level->swap);

		if (nbytes > (level->swap_max > swap ? level->swap_max - swap : 0))
			return -ENOSPC;
	}
	ggroup_shift(group, -(s64)nbytes, nbytes);
	for (level = group; level; level = level->parent) {
		atomic64_add(nbytes, &level->swapout_bytes);
		atomic64_inc(&level->swapouts);
		atomic64_add(usec, &level->move_usec);
	}
	return 0;
}

static int swap_in(struct ggroup *group, u64 nbytes, u64 usec)
{
	struct ggroup *level;

	if (nbytes > (u64)atomic64_read(&group->swap))
		return -EINVAL;
	for (level = group; level; level = level->parent)
		if (atomic64_read(&level->current_bytes) + nbytes > level->high)
			return -EAGAIN;
	ggroup_shift(group, nbytes, -(s64)nbytes);
	for (level = group; level; level = level->parent) {
		atomic64_add(nbytes, &level->swapin_bytes);
		atomic64_inc(&level->swapins);
		atomic64_add(usec, &level->move_usec);
	}
	return 0;
}

int ggroup_swap_out(struct ggroup *group, u64 nbytes, u64 usec)
{
	int err;

	down_write(&group->device->lock);
	err = check(group, nbytes);
	if (!err)
		err = swap_out(group, nbytes, usec);
	up_write(&group->device->lock);
	return err;
}

int ggroup_swap_in(struct ggroup *group, u64 nbytes, u64 usec)
{
	int err;

	down_write(&group->device->lock);
	err = check(group, nbytes);
	if (!err)
		err = swap_in(group, nbytes, usec);
	up_write(&group->device->lock);
	return err;
}

static int observe(struct ggroup *group, u64 nbytes)
{
	s64 more = nbytes - atomic64_read(&group->current_bytes);
	struct ggroup *level;

	for (level = group; level; level = level->parent)
		if (more > 0 && atomic64_read(&level->current_bytes) > (s64)GGROUP_MAX - more)
			return -EINVAL;
	if (more)
		ggroup_shift(group, more, 0);
	return 0;
}

int ggroup_observe(struct ggroup *group, u64 nbytes)
{
	int err;

	down_write(&group->device->lock);
	err = check(group, nbytes);
	if (!err)
		err = observe(group, nbytes);
	up_write(&group->device->lock);
	return err;
}
