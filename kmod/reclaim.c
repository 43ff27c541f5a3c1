// SPDX-License-Identifier: GPL-2.0
/*
 * Whom to take memory from. The rules are those of the memory cgroup, and of
 * backend/soft/reclaim.py, which specifies what is answered here, to the order of the targets: a
 * group's own low does not protect it from its own limit; below the group that is being
 * reclaimed, low protects as effective_protection() in mm/page_counter.c computes it.
 */

#include <linux/jiffies.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/sort.h>

#include "charge.h"
#include "exit.h"
#include "group.h"
#include "reclaim.h"
#include "trace.h"

#define GGROUP_HEADROOM_PART	8	/* the part of a high that a headroom is at most */

/* What one process can give in a round of a plan. */
struct leaf {
	struct ggroup *group;
	u64 fill;	/* granules, so that what is left is level with the others */
	u64 all;	/* granules, if those of the others were not enough */
};

/* Of their own: one that waits for a provider must not hold up an exit. */
static struct workqueue_struct *workers;

static u64 held(const struct ggroup *group)
{
	return atomic64_read(&group->current_bytes);
}

/* Granules that the swap_max of this level still lets go to the host. */
static u64 room(const struct ggroup *group)
{
	u64 swap = atomic64_read(&group->swap);

	if (group->swap_max <= swap)
		return 0;
	return div64_u64(group->swap_max - swap, group->device->granule);
}

/* ... of this level and of those above it. */
static u64 path_room(const struct ggroup *group)
{
	u64 least = U64_MAX;

	for (; group; group = group->parent)
		least = min(least, room(group));
	return least;
}

bool ggroup_reclaimable(struct ggroup *top, struct ggroup *charged, u64 nbytes, u64 over)
{
	u64 granule = top->device->granule;
	u64 own = div64_u64(held(charged) + nbytes, granule);
	struct ggroup *pos;

	/* Mostly the process itself can give enough: then nobody else need be looked at. */
	if (min(own, path_room(charged)) * granule >= over)
		return true;
	for (pos = top; pos; pos = ggroup_next_pre(pos, top))
		pos->scratch.sum = 0;
	for (pos = ggroup_first_post(top); pos; pos = ggroup_next_post(pos, top)) {
		if (list_empty(&pos->children))
			pos->scratch.sum = pos == charged ? own : div64_u64(held(pos), granule);
		pos->scratch.sum = min(pos->scratch.sum, room(pos));
		if (pos != top)
			pos->parent->scratch.sum += pos->scratch.sum;
	}
	return min(top->scratch.sum, path_room(top)) * granule >= over;
}

/*
 * effective_protection() with memory_recursiveprot, for everything below @top in one pass:
 * children share what their parent has protected, in proportion when they ask for more; what none
 * of them asks for goes to all, in proportion to their other memory.
 */
static void protect(struct ggroup *top)
{
	struct ggroup *pos;

	for (pos = top; pos; pos = ggroup_next_pre(pos, top)) {
		pos->scratch.sum = 0;
		if (pos != top)
			pos->parent->scratch.sum += min(held(pos), pos->low);
	}
	top->scratch.low = 0;
	for (pos = ggroup_next_pre(top, top); pos; pos = ggroup_next_pre(pos, top)) {
		u64 protected = min(held(pos), pos->low);
		u64 asked = pos->parent->scratch.sum, ceiling = pos->parent->scratch.low;
		u64 usage = held(pos->parent);

		if (pos->parent == top)
			;	/* children of the one being reclaimed have their low in full */
		else if (asked > ceiling)
			protected = mul_u64_u64_div_u64(protected, ceiling, asked);
		else if (held(pos) > protected && usage > asked)
			protected += mul_u64_u64_div_u64(ceiling - asked, held(pos) - protected,
							 usage - asked);
		pos->scratch.low = protected;
	}
}

/* Most over its own high first, then who has most to give, then who came first. */
static int compare(const void *a, const void *b)
{
	const struct ggroup *one = ((const struct leaf *)a)->group;
	const struct ggroup *other = ((const struct leaf *)b)->group;

	if (one->scratch.over != other->scratch.over)
		return one->scratch.over > other->scratch.over ? -1 : 1;
	if (one->scratch.spare != other->scratch.spare)
		return one->scratch.spare > other->scratch.spare ? -1 : 1;
	return one->scratch.order < other->scratch.order ? -1 : 1;
}

/*
 * What each gives so that @granules are given, or all there are, and what is left is level at the
 * top.
 */
static void water_fill(struct leaf *leaves, unsigned int count, u64 granules)
{
	u64 low = 0, high = 0, sum = 0, over;
	unsigned int i;

	for (i = 0; i < count; i++) {
		sum += leaves[i].all;
		high = max(high, leaves[i].all);
	}
	granules = min(granules, sum);
	while (low < high) {	/* the highest level that gives at least @granules */
		u64 level = low + (high - low + 1) / 2;

		for (sum = 0, i = 0; i < count; i++)
			sum += leaves[i].all > level ? leaves[i].all - level : 0;
		if (sum >= granules)
			low = level;
		else
			high = level - 1;
	}
	for (sum = 0, i = 0; i < count; i++) {
		leaves[i].fill = leaves[i].all > low ? leaves[i].all - low : 0;
		sum += leaves[i].fill;
	}
	/* The level is whole granules: at most one too many from each. */
	for (over = sum - granules, i = count; over && i--;) {
		if (leaves[i].fill) {
			leaves[i].fill--;
			over--;
		}
	}
}

/* Takes up to @most granules from a process, into the plan; returns how many. */
static u64 take(struct ggroup *group, u64 most, u32 flags, struct ggroup_targets *targets)
{
	struct ggroup_target *target = &targets->target[targets->count];
	struct ggroup *level;

	most = min(most, group->scratch.spare);
	for (level = group; level; level = level->parent)
		most = min(most, level->scratch.room);
	if (!most)
		return 0;
	group->scratch.spare -= most;
	group->scratch.taken += most;
	for (level = group; level; level = level->parent)
		level->scratch.room -= most;
	target->id = group->id;
	target->nbytes = most * group->device->granule;
	target->flags = flags;
	targets->count++;
	return most;
}

static unsigned int find_leaves(struct ggroup *top, bool below_low, struct leaf *leaves)
{
	unsigned int count = 0, order = 0;
	struct ggroup *pos;

	for (pos = top; pos; pos = ggroup_next_pre(pos, top)) {
		u64 free = div64_u64(held(pos) - (below_low ? 0 : pos->scratch.low),
				     pos->device->granule);

		if (!list_empty(&pos->children))
			continue;
		pos->scratch.order = order++;
		pos->scratch.over = held(pos) > pos->high ? held(pos) - pos->high : 0;
		pos->scratch.spare = free > pos->scratch.taken ? free - pos->scratch.taken : 0;
		if (pos->scratch.spare)
			leaves[count++] = (struct leaf) { .group = pos, .all = pos->scratch.spare };
	}
	sort(leaves, count, sizeof(*leaves), compare, NULL);
	return count;
}

static void plan(struct ggroup *top, u64 nbytes, struct leaf *leaves,
		 struct ggroup_targets *targets)
{
	u64 wanted = div64_u64(nbytes, top->device->granule);
	unsigned int round, i, count;
	struct ggroup *pos;

	if (wanted * top->device->granule != nbytes)
		wanted++;
	protect(top);
	for (pos = top; pos; pos = ggroup_next_pre(pos, top)) {
		pos->scratch.room = room(pos);
		pos->scratch.taken = 0;
	}
	for (pos = top; pos; pos = pos->parent)
		pos->scratch.room = room(pos);
	/* What is not protected, then, if that was not enough, what is. */
	for (round = 0; round < 2; round++) {
		u32 flags = round ? GGROUP_TARGET_BELOW_LOW : 0;

		count = find_leaves(top, round, leaves);
		water_fill(leaves, count, wanted);
		for (i = 0; i < count; i++)
			wanted -= take(leaves[i].group, min(leaves[i].fill, wanted), flags,
				       targets);
		/* Hands on what a full swap kept the first from giving. */
		for (i = 0; i < count; i++)
			wanted -= take(leaves[i].group, min(leaves[i].all, wanted), flags,
				       targets);
	}
}

#define TARGETS_A_LEAF	4	/* of each round, and each half of it */

int ggroup_plan(struct ggroup *top, u64 nbytes, struct ggroup_targets *targets)
{
	struct ggroup_device *device = top->device;
	unsigned int most = READ_ONCE(device->groups);
	struct leaf *leaves;
	bool alive;

	for (;;) {
		leaves = kvmalloc_array(most, sizeof(*leaves), GFP_KERNEL);
		targets->target = kvcalloc(most, TARGETS_A_LEAF * sizeof(*targets->target),
					   GFP_KERNEL);
		targets->count = 0;
		if (!leaves || !targets->target) {
			kvfree(leaves);
			ggroup_plan_free(targets);
			return -ENOMEM;
		}
		down_write(&device->lock);
		if (device->groups <= most)
			break;
		most = device->groups;
		up_write(&device->lock);
		kvfree(leaves);
		ggroup_plan_free(targets);
	}
	alive = top->alive;
	if (alive)
		plan(top, nbytes, leaves, targets);
	up_write(&device->lock);
	kvfree(leaves);
	if (alive)
		return 0;
	ggroup_plan_free(targets);
	return -ENODEV;
}

void ggroup_plan_free(struct ggroup_targets *targets)
{
	kvfree(targets->target);
	targets->target = NULL;
	targets->count = 0;
}

/* An event of a group that may have left meanwhile. */
static void note(struct ggroup *group, unsigned int event)
{
	down_read(&group->device->lock);
	if (group->alive)
		ggroup_count(group, event);
	up_read(&group->device->lock);
}

static int reclaim_from(const struct ggroup_target *target, u32 timeout_ms, u64 *moved)
{
	struct ggroup *group = ggroup_find(target->id);
	u64 nbytes = 0;
	int err;

	if (!group)
		return 0;	/* it exited while others gave, and took its memory along */
	if (target->flags & GGROUP_TARGET_BELOW_LOW)
		note(group, GGROUP_EVENT_LOW);
	ggroup_press(group, target->nbytes);
	err = ggroup_command(group, GGROUP_LEVER_RECLAIM, target->nbytes, timeout_ms, &nbytes);
	trace_ggroup_reclaim(group->id, target->nbytes, nbytes, err);
	if (!err && nbytes)
		note(group, GGROUP_EVENT_RECLAIM);
	if (err && (!READ_ONCE(group->alive) || ggroup_exited(group)))
		err = 0;
	*moved += nbytes;
	ggroup_put(group);
	return err;
}

int ggroup_reclaim(struct ggroup *top, u64 nbytes, u32 timeout_ms, u64 *moved)
{
	unsigned long end = jiffies + msecs_to_jiffies(timeout_ms ?: GGROUP_TIMEOUT_MS);
	struct ggroup_targets targets;
	unsigned int i;
	int err;

	*moved = 0;
	err = ggroup_plan(top, nbytes, &targets);
	for (i = 0; !err && i < targets.count; i++) {
		long left = end - jiffies;

		err = left > 0 ? reclaim_from(&targets.target[i], max(1U, jiffies_to_msecs(left)),
					      moved) : -ETIMEDOUT;
	}
	ggroup_plan_free(&targets);
	return err;
}

/*
 * Where the workers begin: a headroom below the high. It is meant for a GPU that fills up; of a
 * small group it would be everything.
 */
static u64 reclaim_start(const struct ggroup *group)
{
	return group->high - min(group->device->headroom, group->high / GGROUP_HEADROOM_PART);
}

/*
 * Bytes that @group is over where the workers begin, less those that are on their way out
 * already.
 */
static u64 excess(struct ggroup *group)
{
	u64 start, over = 0;
	struct ggroup *pos;

	down_write(&group->device->lock);
	start = reclaim_start(group);
	if (group->alive && held(group) > start)
		over = held(group) - start;
	for (pos = group; over && pos; pos = ggroup_next_pre(pos, group))
		over -= min(over, ggroup_reclaiming(pos));
	up_write(&group->device->lock);
	return over;
}

void ggroup_reclaim_work(struct work_struct *work)
{
	struct ggroup *group = container_of(work, struct ggroup, reclaim_work);
	u64 over, moved;
	bool noted = false;

	while ((over = excess(group))) {
		if (!noted) {
			note(group, GGROUP_EVENT_HIGH);
			if (group->kind != GGROUP_KIND_PROCESS)
				ggroup_press(group, over);
		}
		noted = true;
		if (ggroup_reclaim(group, over, 0, &moved) || !moved) {
			note(group, GGROUP_EVENT_FAIL);
			break;
		}
	}
	ggroup_put(group);
}

void ggroup_reclaim_wake(struct ggroup *group)
{
	struct ggroup *level;

	if (!READ_ONCE(group->device->queue.online))
		return;		/* nobody could move anything */
	for (level = group; level; level = level->parent) {
		if (level->high != GGROUP_MAX && held(level) > reclaim_start(level)) {
			ggroup_get(level);
			if (!queue_work(workers, &level->reclaim_work))
				ggroup_put(level);
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
