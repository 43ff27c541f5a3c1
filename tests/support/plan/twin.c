// SPDX-License-Identifier: GPL-2.0
/* kmod/plan.c on a tree that a test gives: one tree at a time, each group known by its place in it. */

#include "kernel.h"
#include "plan.h"

#define GROUPS	64

/* A group as the test gives it; its parent comes before it. */
struct row {
	u64 above;	/* place of the parent, from 1; 0 for the root */
	u64 process;	/* whether it is a process */
	u64 current_bytes, swap, high, low, swap_max;
};

static struct ggroup_device device, other;
static struct ggroup groups[GROUPS];
static u64 now_ns;
static u64 late;	/* id of a group of another device, found from the second lookup on */

#define group_of(link)	((struct ggroup *)((char *)(link) - offsetof(struct ggroup, sibling)))

u64 ktime_get_ns(void)
{
	return now_ns;
}

struct ggroup *ggroup_group_find(u64 id)
{
	if (id && id == late) {
		late = 0;
		return NULL;
	}
	return id && id <= device.groups ? &groups[id - 1] : NULL;
}

void ggroup_group_put(struct ggroup *group)
{
	(void)group;
}

struct ggroup *ggroup_group_next_pre(struct ggroup *pos, const struct ggroup *top)
{
	if (!list_empty(&pos->children))
		return group_of(pos->children.next);
	for (; pos != top; pos = pos->parent)
		if (pos->sibling.next != &pos->parent->children)
			return group_of(pos->sibling.next);
	return NULL;
}

struct ggroup *ggroup_group_first_post(struct ggroup *top)
{
	while (!list_empty(&top->children))
		top = group_of(top->children.next);
	return top;
}

struct ggroup *ggroup_group_next_post(struct ggroup *pos, const struct ggroup *top)
{
	if (pos == top)
		return NULL;
	if (pos->sibling.next == &pos->parent->children)
		return pos->parent;
	return ggroup_group_first_post(group_of(pos->sibling.next));
}

void twin_make(const struct row *rows, unsigned int count, u64 granule)
{
	unsigned int i;

	memset(groups, 0, sizeof(groups));
	late = 0;
	device = (struct ggroup_device) { .granule = granule, .groups = count };
	for (i = 0; i < count && i < GROUPS; i++) {
		struct ggroup *group = &groups[i];
		struct list_head *head;

		*group = (struct ggroup) {
			.id = i + 1, .alive = true, .device = &device,
			.kind = !rows[i].above ? GGROUP_KIND_ROOT :
				rows[i].process ? GGROUP_KIND_PROCESS : GGROUP_KIND_SLICE,
			.current_bytes = rows[i].current_bytes, .swap = rows[i].swap,
			.high = rows[i].high, .low = rows[i].low, .swap_max = rows[i].swap_max,
		};
		group->children = (struct list_head) { &group->children, &group->children };
		if (!rows[i].above)
			continue;
		group->parent = &groups[rows[i].above - 1];
		head = &group->parent->children;
		group->sibling = (struct list_head) { head, head->prev };
		head->prev->next = &group->sibling;
		head->prev = &group->sibling;
	}
}

int twin_foresee(u64 now, const struct ggroup_use *uses, unsigned int count)
{
	int err;

	now_ns = now;
	err = ggroup_plan_foresee(&groups[0], uses, count);
	for (unsigned int i = 0; i < device.groups; i++)
		groups[i].device = &device;
	return err;
}

/* Set the late group for the next call of twin_foresee(). */
void twin_late(u64 id)
{
	late = id;
	groups[id - 1].device = &other;
}

/* Return the number of targets, or a negated errno. */
int twin_plan(u64 now, u64 top, u64 nbytes, struct ggroup_target *to, unsigned int capacity)
{
	struct ggroup_targets targets;
	int err;

	now_ns = now;
	err = ggroup_plan_make(&groups[top - 1], nbytes, &targets);
	if (err)
		return err;
	if (targets.count > capacity)
		err = -ENOSPC;
	else
		memcpy(to, targets.target, targets.count * sizeof(*to));
	err = err ?: (int)targets.count;
	ggroup_plan_free(&targets);
	return err;
}

int twin_reclaimable(u64 top, u64 charged, u64 nbytes, u64 over)
{
	return ggroup_plan_reclaimable(&groups[top - 1], &groups[charged - 1], nbytes, over);
}
