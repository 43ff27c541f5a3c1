// SPDX-License-Identifier: GPL-2.0
/*
 * The figures. Each call checks all that it depends on, at every level, and only then adds, under
 * one lock. So nothing is added that has to be undone, no caller sees or takes what was not
 * granted, and callers are served in turn, however many there are. A call that has to check more
 * than a path holds the device's lock for writing.
 */

#include <linux/lockdep.h>
#include <linux/mm.h>
#include <linux/timekeeping.h>

#include "charge.h"
#include "device.h"
#include "event.h"
#include "group.h"
#include "plan.h"
#include "reclaim.h"
#include "trace.h"

/* Bound on the bytes that a program can claim to have moved: more than any link moves, 1 TB/s. */
#define GGROUP_LINK_MOST	1024	/* bytes per nanosecond */

/* As MAX_RECLAIM_RETRIES of the memory cgroup. */
#define GGROUP_CHARGE_ROUNDS	16	/* tries of a charge that waits for reclaim */

static void assert_figures(const struct ggroup *group)
{
	lockdep_assert(lockdep_is_held_type(&group->device->lock, 0) ||
		       lockdep_is_held(&group->device->figures));
}

static int check(const struct ggroup *group, u64 nbytes)
{
	if (!group->alive)
		return -ENODEV;
	if (group->kind != GGROUP_KIND_PROCESS || nbytes > GGROUP_MAX)
		return -EINVAL;
	return 0;
}

/*
 * Self-reported charges are bounded: without a limit, a program that claims 2^62 bytes would use up
 * the counters of its ancestors, at its neighbours' cost, until the driver's figure corrects it.
 */
static int check_charge(const struct ggroup *group, u64 nbytes, bool tenant)
{
	u64 most, has;
	int err = check(group, nbytes);

	if (err || !tenant)
		return err;
	most = min(group->device->root->high, GGROUP_MAX / GGROUP_OVERCOMMIT) * GGROUP_OVERCOMMIT;
	has = group->current_bytes + group->swap;
	return nbytes > most || has > most - nbytes ? -ENOMEM : 0;
}

/*
 * Change a figure. Callers have checked that it becomes neither negative nor more than GGROUP_MAX.
 * Where one of them was wrong, the figure stops there, since a plan would believe a value just
 * below 2^64.
 */
static void change(u64 *figure, s64 by)
{
	u64 less = by < 0 ? -(u64)by : 0, more = by < 0 ? 0 : by;

	if (WARN_ON_ONCE(less > *figure))
		less = *figure;
	if (WARN_ON_ONCE(more > GGROUP_MAX - *figure))
		more = GGROUP_MAX - *figure;
	/* The waking of the workers reads it without the lock. */
	WRITE_ONCE(*figure, *figure - less + more);
}

static void shift_one(struct ggroup *level, s64 held, s64 swapped)
{
	if (held) {
		change(&level->current_bytes, held);
		if (held > 0)
			ggroup_peak_see(&level->peaks[GGROUP_PEAK_GMEM], level->current_bytes);
	}
	if (swapped) {
		change(&level->swap, swapped);
		if (swapped > 0)
			ggroup_peak_see(&level->peaks[GGROUP_PEAK_SWAP], level->swap);
	}
}

void ggroup_charge_shift(struct ggroup *group, s64 held, s64 swapped)
{
	struct ggroup *level;

	assert_figures(group);
	for (level = group; level; level = level->parent)
		shift_one(level, held, swapped);
}

/* Return whether @nbytes more leave a level at or under its high and its limit_max. */
static bool fits(const struct ggroup *level, u64 nbytes)
{
	u64 limit = ggroup_group_limit(level);

	return nbytes <= limit && level->current_bytes <= limit - nbytes;
}

static bool fits_all(const struct ggroup *group, u64 nbytes)
{
	const struct ggroup *level;

	for (level = group; level; level = level->parent)
		if (!fits(level, nbytes))
			return false;
	return true;
}

/* Return false where some level would end up over a limit, which charge_slow() decides. */
static bool charge_fast(struct ggroup *group, u64 nbytes, bool tenant, int *err)
{
	bool done;

	spin_lock(&group->device->figures);
	*err = check_charge(group, nbytes, tenant);
	done = *err || fits_all(group, nbytes);
	if (done && !*err)
		ggroup_charge_shift(group, nbytes, 0);
	spin_unlock(&group->device->figures);
	if (done && !*err && tenant && group->device->headroom)
		ggroup_reclaim_wake(group);
	return done;
}

/*
 * Check whether a level may hold @now, of which @nbytes are being charged to @group: 0; -ENOMEM; or
 * -EAGAIN where enough memory can leave the level first. Memory that is not there yet cannot leave.
 */
static int check_level(struct ggroup *level, struct ggroup *group, u64 nbytes, u64 now)
{
	if (now > GGROUP_MAX)
		return -ENOMEM;
	if (now > level->limit_max) {
		ggroup_event_count(level, GGROUP_EVENT_MAX);
		return ggroup_plan_reclaimable(level, group, 0, now - level->limit_max) ?
		       -EAGAIN : -ENOMEM;
	}
	if (now > level->high && !ggroup_plan_reclaimable(level, group, nbytes, now - level->high))
		return -ENOMEM;
	return 0;
}

/*
 * Charge where some level may end up over a limit. Over its high is fine, unless nothing can bring
 * it back. Over its limit_max none may end up: where enough could leave it, the result is -EAGAIN,
 * @full is that level, with a reference, and @over the bytes that have to leave.
 */
static int charge_slow(struct ggroup *group, u64 nbytes, bool tenant, struct ggroup **full,
		       u64 *over)
{
	struct ggroup *level;
	int err;

	lockdep_assert_held_write(&group->device->lock);
	err = check_charge(group, nbytes, tenant);
	if (err)
		return err;
	for (level = group; level; level = level->parent) {
		u64 now = level->current_bytes + nbytes;

		err = check_level(level, group, nbytes, now);
		if (err == -ENOMEM)
			ggroup_event_count(group, GGROUP_EVENT_OOM);
		if (err == -EAGAIN) {
			*full = ggroup_group_get(level);
			*over = now - level->limit_max;
		}
		if (err)
			return err;
	}
	ggroup_charge_shift(group, nbytes, 0);
	for (level = group; level; level = level->parent)
		if (level->current_bytes > level->high)
			trace_ggroup_over_high(level->id, level->current_bytes, level->high);
	if (tenant)
		ggroup_reclaim_wake(group);
	return 0;
}

/* Fail a charge for which a limit_max leaves no room, and no room can be made. */
static int out_of_memory(struct ggroup *group)
{
	int err = -ENOMEM;

	down_read(&group->device->lock);
	if (group->alive)
		ggroup_event_count(group, GGROUP_EVENT_OOM);
	else
		err = -ENODEV;
	up_read(&group->device->lock);
	return err;
}

/* Reclaim over a limit_max and try again, as try_charge_memcg() of mm/memcontrol.c does. */
static noinline int charge_reclaiming(struct ggroup *group, u64 nbytes, bool tenant)
{
	unsigned int round;
	u64 over, moved;
	int err, failed;

	for (round = 0;; round++) {
		struct ggroup *full = NULL;

		down_write(&group->device->lock);
		err = charge_slow(group, nbytes, tenant, &full, &over);
		up_write(&group->device->lock);
		if (!full)
			return err;
		if (!tenant) {	/* the caller has memory moved, and charges again */
			ggroup_group_put(full);
			return err;
		}
		failed = ggroup_reclaim_below(full, over, 0, &moved);
		ggroup_group_put(full);
		if (failed == -EINTR)
			return failed;
		if (!moved || round == GGROUP_CHARGE_ROUNDS)
			return out_of_memory(group);
	}
}

int ggroup_charge_add(struct ggroup *group, u64 nbytes, bool tenant)
{
	struct ggroup_device *device = group->device;
	bool done;
	int err;

	down_read(&device->lock);
	done = charge_fast(group, nbytes, tenant, &err);
	up_read(&device->lock);
	if (!done)
		err = charge_reclaiming(group, nbytes, tenant);
	trace_ggroup_charge(group->id, nbytes, err);
	return err;
}

static int uncharge(struct ggroup *group, u64 nbytes)
{
	if (nbytes > group->current_bytes)
		return -EINVAL;
	ggroup_charge_shift(group, -(s64)nbytes, 0);
	return 0;
}

static int uncharge_swap(struct ggroup *group, u64 nbytes)
{
	if (nbytes > group->swap)
		return -EINVAL;
	ggroup_charge_shift(group, 0, -(s64)nbytes);
	return 0;
}

/**
 * struct move - the statistics of a move
 * @nbytes: bytes moved
 * @usec: time that it took, in microseconds
 */
struct move {
	u64 nbytes;
	u64 usec;
};

/*
 * Bound the statistics of a self-reported move, which count at every level: all moves of a program
 * together are at most what a link moves in its lifetime, and take at most that time.
 */
static void bound_move(const struct ggroup *group, struct move *move)
{
	u64 lived = ktime_get_ns() - group->born_ns;
	u64 bytes_most = min(lived, GGROUP_MAX / GGROUP_LINK_MOST) * GGROUP_LINK_MOST;
	u64 usec_most = div_u64(lived, NSEC_PER_USEC);
	u64 moved = group->swapin_bytes + group->swapout_bytes;

	move->nbytes = min(move->nbytes, bytes_most - min(bytes_most, moved));
	move->usec = min(move->usec, usec_most - min(usec_most, group->move_usec));
}

/* Statistics stop at GGROUP_MAX. */
static void count_up(u64 *figure, u64 by)
{
	*figure = min(*figure + min(by, GGROUP_MAX), GGROUP_MAX);
}

static int swap_out(struct ggroup *group, u64 nbytes, const struct move *move)
{
	struct ggroup *level;

	if (nbytes > group->current_bytes)
		return -EINVAL;
	for (level = group; level; level = level->parent)
		if (nbytes > (level->swap_max > level->swap ? level->swap_max - level->swap : 0))
			return -ENOSPC;
	ggroup_charge_shift(group, -(s64)nbytes, nbytes);
	for (level = group; level; level = level->parent) {
		count_up(&level->swapout_bytes, move->nbytes);
		count_up(&level->swapouts, 1);
		count_up(&level->move_usec, move->usec);
	}
	return 0;
}

static int swap_in(struct ggroup *group, u64 nbytes, const struct move *move)
{
	struct ggroup *level;

	if (nbytes > group->swap)
		return -EINVAL;
	if (!fits_all(group, nbytes))
		return -EAGAIN;
	ggroup_charge_shift(group, nbytes, -(s64)nbytes);
	for (level = group; level; level = level->parent) {
		count_up(&level->swapin_bytes, move->nbytes);
		count_up(&level->swapins, 1);
		count_up(&level->move_usec, move->usec);
	}
	return 0;
}

/* Only one path is involved, so calls elsewhere in the tree need not wait for this one. */
static int on_path(struct ggroup *group, u64 nbytes, int (*call)(struct ggroup *group, u64 nbytes))
{
	struct ggroup_device *device = group->device;
	int err;

	down_read(&device->lock);
	spin_lock(&device->figures);
	err = check(group, nbytes);
	if (!err)
		err = call(group, nbytes);
	spin_unlock(&device->figures);
	up_read(&device->lock);
	return err;
}

int ggroup_charge_sub(struct ggroup *group, u64 nbytes)
{
	return on_path(group, nbytes, uncharge);
}

int ggroup_charge_sub_swap(struct ggroup *group, u64 nbytes)
{
	return on_path(group, nbytes, uncharge_swap);
}

static int moved(struct ggroup *group, u64 nbytes, u64 usec, bool tenant,
		 int (*call)(struct ggroup *group, u64 nbytes, const struct move *move))
{
	struct ggroup_device *device = group->device;
	struct move move = { nbytes, usec };
	int err;

	if (tenant && !nbytes)
		return -EINVAL;
	down_read(&device->lock);
	spin_lock(&device->figures);
	err = check(group, nbytes);
	if (tenant)
		bound_move(group, &move);
	if (!err)
		err = call(group, nbytes, &move);
	spin_unlock(&device->figures);
	up_read(&device->lock);
	return err;
}

int ggroup_charge_swap_out(struct ggroup *group, u64 nbytes, u64 usec, bool tenant)
{
	return moved(group, nbytes, usec, tenant, swap_out);
}

int ggroup_charge_swap_in(struct ggroup *group, u64 nbytes, u64 usec, bool tenant)
{
	return moved(group, nbytes, usec, tenant, swap_in);
}

static int observe(struct ggroup *group, u64 nbytes)
{
	struct ggroup *level;
	s64 more;

	more = nbytes - group->current_bytes;
	for (level = group; level; level = level->parent)
		if (more > 0 && level->current_bytes > GGROUP_MAX - more)
			return -EINVAL;
	ggroup_charge_shift(group, more, 0);
	return 0;
}

int ggroup_charge_observe(struct ggroup *group, u64 nbytes)
{
	return on_path(group, nbytes, observe);
}
