// SPDX-License-Identifier: GPL-2.0
/*
 * Planning of reclaim. The rules are those of the memory cgroup, and of backend/ledgers/reclaim.py,
 * which specifies the results, down to the order of the targets: a group's own low does not protect
 * it from its own limit; below the group that is being reclaimed, low protects as
 * effective_protection() in mm/page_counter.c computes it.
 */

#include <linux/lockdep.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/sort.h>
#include <linux/timekeeping.h>

#include "device.h"
#include "group.h"
#include "plan.h"

/* A process that can give in a round of a plan. */
struct leaf {
	struct ggroup *group;
	u64 fill;	/* granules whose loss leaves all processes level at the top */
	u64 all;	/* granules, if those of the others were not enough */
};

/* Return the granules that the swap_max of this level still allows in the host. */
static u64 room(const struct ggroup *group)
{
	if (group->swap_max <= group->swap)
		return 0;
	return div64_u64(group->swap_max - group->swap, group->device->granule);
}

/* Return the granules that those of this level and the levels above all still allow. */
static u64 path_room(const struct ggroup *group)
{
	u64 least = U64_MAX;

	for (; group; group = group->parent)
		least = min(least, room(group));
	return least;
}

bool ggroup_plan_reclaimable(struct ggroup *top, struct ggroup *charged, u64 nbytes, u64 over)
{
	u64 granule = top->device->granule;
	u64 own = div64_u64(ggroup_group_held(charged) + nbytes, granule);
	struct ggroup *pos;

	lockdep_assert_held_write(&top->device->lock);
	/* Usually the process itself can give enough; then no other need be looked at. */
	if (min(own, path_room(charged)) * granule >= over)
		return true;
	for (pos = top; pos; pos = ggroup_group_next_pre(pos, top))
		pos->scratch.sum = 0;
	for (pos = ggroup_group_first_post(top); pos; pos = ggroup_group_next_post(pos, top)) {
		if (list_empty(&pos->children))
			pos->scratch.sum = pos == charged ? own :
					   div64_u64(ggroup_group_held(pos), granule);
		pos->scratch.sum = min(pos->scratch.sum, room(pos));
		if (pos != top)
			pos->parent->scratch.sum += pos->scratch.sum;
	}
	return min(top->scratch.sum, path_room(top)) * granule >= over;
}

/*
 * Compute effective_protection() with memory_recursiveprot, for everything below @top in one pass:
 * children share what their parent has protected, in proportion when they ask for more; what none
 * of them asks for goes to all, in proportion to their other memory.
 */
static void protect(struct ggroup *top)
{
	struct ggroup *pos;

	for (pos = top; pos; pos = ggroup_group_next_pre(pos, top)) {
		pos->scratch.sum = 0;
		if (pos != top)
			pos->parent->scratch.sum += min(ggroup_group_held(pos), pos->low);
	}
	top->scratch.low = 0;
	for (pos = ggroup_group_next_pre(top, top); pos; pos = ggroup_group_next_pre(pos, top)) {
		u64 protected = min(ggroup_group_held(pos), pos->low);
		u64 asked = pos->parent->scratch.sum, ceiling = pos->parent->scratch.low;
		u64 usage = ggroup_group_held(pos->parent);

		if (pos->parent == top)
			;	/* children of the one being reclaimed have their low in full */
		else if (asked > ceiling)
			protected = mul_u64_u64_div_u64(protected, ceiling, asked);
		else if (ggroup_group_held(pos) > protected && usage > asked)
			protected += mul_u64_u64_div_u64(ceiling - asked,
							 ggroup_group_held(pos) - protected,
							 usage - asked);
		pos->scratch.low = protected;
	}
}

static bool fits(const struct ggroup *group, const struct ggroup *root)
{
	return group->device == root->device && group->kind == GGROUP_KIND_PROCESS;
}

int ggroup_plan_foresee(struct ggroup *root, const struct ggroup_use *uses, unsigned int count)
{
	u64 now = ktime_get_ns();
	struct ggroup *group;
	unsigned int i;
	bool fit;

	lockdep_assert_held_write(&root->device->lock);
	/* All are checked before any is set. A group that has left meanwhile is skipped. */
	for (i = 0; i < count; i++) {
		if (uses[i].reserved || uses[i].next > GGROUP_NEXT_USE_MOST)
			return -EINVAL;
		group = ggroup_group_find(uses[i].id);
		if (!group)
			continue;
		fit = fits(group, root);
		ggroup_group_put(group);
		if (!fit)
			return -EINVAL;
	}
	for (i = 0; i < count; i++) {
		group = ggroup_group_find(uses[i].id);
		if (!group)
			continue;
		/* Only this device is locked: another one may have made the group meanwhile. */
		if (fits(group, root)) {
			group->next_use = uses[i].next;
			group->next_use_ns = now;
		}
		ggroup_group_put(group);
	}
	return 0;
}

/* Return the next use of a group; GGROUP_NEXT_USE_SOON where it was told too long ago. */
static u32 next_use(const struct ggroup *group, u64 now)
{
	if (now - group->next_use_ns >= (u64)GGROUP_NEXT_USE_S * NSEC_PER_SEC)
		return GGROUP_NEXT_USE_SOON;
	return group->next_use;
}

/*
 * Order leaves by the farthest next use, then the most over the own high, then the most to give,
 * then age.
 */
static int compare(const void *a, const void *b)
{
	const struct ggroup *one = ((const struct leaf *)a)->group;
	const struct ggroup *other = ((const struct leaf *)b)->group;

	if (one->scratch.next_use != other->scratch.next_use)
		return one->scratch.next_use > other->scratch.next_use ? -1 : 1;
	if (one->scratch.over != other->scratch.over)
		return one->scratch.over > other->scratch.over ? -1 : 1;
	if (one->scratch.spare != other->scratch.spare)
		return one->scratch.spare > other->scratch.spare ? -1 : 1;
	return one->scratch.order < other->scratch.order ? -1 : 1;
}

/*
 * Set what each leaf gives so that @granules are given, or all there are, and what is left is level
 * at the top.
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

/* Take up to @most granules from a process, into the plan; return the number taken. */
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

/*
 * Take from processes of one class, level at the top; then take what a full swap kept some of them
 * from giving from the rest. Return the granules still wanted.
 */
static u64 take_level(struct leaf *leaves, unsigned int count, u64 wanted, u32 flags,
		      struct ggroup_targets *targets)
{
	unsigned int i;

	water_fill(leaves, count, wanted);
	for (i = 0; i < count; i++)
		wanted -= take(leaves[i].group, min(leaves[i].fill, wanted), flags, targets);
	for (i = 0; i < count; i++)
		wanted -= take(leaves[i].group, min(leaves[i].all, wanted), flags, targets);
	return wanted;
}

/* Return how many of the first leaves are of one class. */
static unsigned int count_equals(const struct leaf *leaves, unsigned int count)
{
	unsigned int i = 1;

	while (i < count && leaves[i].group->scratch.next_use == leaves[0].group->scratch.next_use)
		i++;
	return i;
}

static unsigned int find_leaves(struct ggroup *top, bool below_low, struct leaf *leaves)
{
	unsigned int count = 0, order = 0;
	struct ggroup *pos;

	for (pos = top; pos; pos = ggroup_group_next_pre(pos, top)) {
		u64 held = ggroup_group_held(pos);
		u64 free = div64_u64(held - (below_low ? 0 : pos->scratch.low),
				     pos->device->granule);

		if (!list_empty(&pos->children))
			continue;
		pos->scratch.order = order++;
		pos->scratch.over = held > pos->high ? held - pos->high : 0;
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
	u64 wanted = div64_u64(nbytes, top->device->granule), now = ktime_get_ns();
	unsigned int round, first, count, equals;
	struct ggroup *pos;

	if (wanted * top->device->granule != nbytes)
		wanted++;
	protect(top);
	for (pos = top; pos; pos = ggroup_group_next_pre(pos, top)) {
		pos->scratch.room = room(pos);
		pos->scratch.taken = 0;
		pos->scratch.next_use = next_use(pos, now);
	}
	for (pos = top; pos; pos = pos->parent)
		pos->scratch.room = room(pos);
	/* Unprotected memory first, then, if that was not enough, protected memory. */
	for (round = 0; round < 2; round++) {
		u32 flags = round ? GGROUP_TARGET_BELOW_LOW : 0;

		count = find_leaves(top, round, leaves);
		for (first = 0; first < count; first += equals) {
			equals = count_equals(leaves + first, count - first);
			wanted = take_level(leaves + first, equals, wanted, flags, targets);
		}
	}
}

#define TARGETS_A_LEAF	4	/* in each round, in each of its halves */

int ggroup_plan_make(struct ggroup *top, u64 nbytes, struct ggroup_targets *targets)
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
