// SPDX-License-Identifier: GPL-2.0
/* Reclaim: carries plans out, for a caller or in the worker of a group over its limit. */

#include <linux/jiffies.h>
#include <linux/lockdep.h>
#include <linux/workqueue.h>

#include "device.h"
#include "event.h"
#include "group.h"
#include "lever.h"
#include "plan.h"
#include "process.h"
#include "reclaim.h"
#include "trace.h"
#include "usermem.h"

#define GGROUP_HEADROOM_PART	8	/* a headroom takes at most one in this many of a high */
#define GGROUP_VAIN_MOST	16	/* most rounds of a worker that bring nothing */

/* A queue of their own: a worker that waits for a provider must not delay an exit. */
static struct workqueue_struct *workers;

/* Count an event of a group that may have left meanwhile. */
static void note(struct ggroup *group, unsigned int event)
{
	down_read(&group->device->lock);
	if (group->alive)
		ggroup_event_count(group, event);
	up_read(&group->device->lock);
}

static int reclaim_from(const struct ggroup_target *target, u32 timeout_ms, u64 *moved)
{
	struct ggroup *group = ggroup_group_find(target->id);
	u64 nbytes = 0;
	int err;

	if (!group)
		return 0;	/* it exited while others gave, with its memory */
	if (target->flags & GGROUP_TARGET_BELOW_LOW)
		note(group, GGROUP_EVENT_LOW);
	ggroup_usermem_press(group, target->nbytes);
	err = ggroup_lever_command(group, GGROUP_LEVER_RECLAIM, target->nbytes, timeout_ms,
				   &nbytes);
	trace_ggroup_reclaim(group->id, target->nbytes, nbytes, err);
	if (!err && nbytes)
		note(group, GGROUP_EVENT_RECLAIM);
	if (err && (!READ_ONCE(group->alive) || ggroup_process_exited(group)))
		err = 0;
	*moved += min(nbytes, GGROUP_MAX - *moved);
	ggroup_group_put(group);
	return err;
}

/*
 * The time is up, the caller has a signal, or there is no provider: no other process would answer.
 */
static bool ends_all(int err)
{
	return err == -ETIMEDOUT || err == -EINTR || err == -ENODEV;
}

int ggroup_reclaim_below(struct ggroup *top, u64 nbytes, u32 timeout_ms, u64 *moved)
{
	unsigned long end = jiffies + msecs_to_jiffies(timeout_ms ?: GGROUP_TIMEOUT_MS);
	struct ggroup_targets targets;
	unsigned int i;
	int err, each;

	*moved = 0;
	err = ggroup_plan_make(top, nbytes, &targets);
	/*
	 * A process that cannot give does not stop the others: its error counts only where none
	 * gave.
	 */
	for (i = 0; !ends_all(err) && i < targets.count; i++) {
		long left = end - jiffies;

		each = left > 0 ? reclaim_from(&targets.target[i], max(1U, jiffies_to_msecs(left)),
					       moved) : -ETIMEDOUT;
		err = ends_all(each) ? each : err ?: each;
	}
	ggroup_plan_free(&targets);
	return *moved && !ends_all(err) ? 0 : err;
}

/*
 * The level at which workers begin: a headroom below the high. The headroom is meant for a GPU that
 * fills up; of a small group it would be everything.
 */
static u64 reclaim_start(const struct ggroup *group)
{
	u64 limit = ggroup_group_limit(group);

	return limit - min(group->device->headroom, limit / GGROUP_HEADROOM_PART);
}

/*
 * Return the bytes by which @group is over the level at which workers begin, less those that are
 * already on their way out.
 */
static u64 excess(struct ggroup *group)
{
	u64 start, over = 0;
	struct ggroup *pos;

	down_write(&group->device->lock);
	start = reclaim_start(group);
	if (group->alive && ggroup_group_held(group) > start)
		over = ggroup_group_held(group) - start;
	for (pos = group; over && pos; pos = ggroup_group_next_pre(pos, group))
		over -= min(over, ggroup_lever_reclaiming(pos));
	up_write(&group->device->lock);
	return over;
}

void ggroup_reclaim_work(struct work_struct *work)
{
	struct ggroup *group = container_of(work, struct ggroup, reclaim_work);
	u64 over, moved, before = U64_MAX;
	unsigned int vain = 0;
	bool noted = false;

	while ((over = excess(group))) {
		if (!noted) {
			note(group, GGROUP_EVENT_HIGH);
			if (group->kind != GGROUP_KIND_PROCESS)
				ggroup_usermem_press(group, over);
		}
		noted = true;
		/* The moved bytes are a program's word; the books say whether it is true. */
		vain = over < before ? 0 : vain + 1;
		before = over;
		if (ggroup_reclaim_below(group, over, 0, &moved) || !moved ||
		    vain > GGROUP_VAIN_MOST) {
			note(group, GGROUP_EVENT_FAIL);
			break;
		}
	}
	ggroup_group_put(group);
}

void ggroup_reclaim_wake(struct ggroup *group)
{
	struct ggroup *level;

	lockdep_assert_held(&group->device->lock);
	if (!READ_ONCE(group->device->queue.online))
		return;		/* no provider could move anything */
	for (level = group; level; level = level->parent) {
		if (ggroup_group_limit(level) != GGROUP_MAX &&
		    ggroup_group_held(level) > reclaim_start(level)) {
			ggroup_group_get(level);
			if (!queue_work(workers, &level->reclaim_work))
				ggroup_group_put(level);
		}
	}
}

int ggroup_reclaim_init(void)
{
	workers = alloc_workqueue("ggroup-reclaim", WQ_UNBOUND, 0);
	return workers ? 0 : -ENOMEM;
}

void ggroup_reclaim_exit(void)
{
	destroy_workqueue(workers);
}
