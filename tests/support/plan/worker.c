// SPDX-License-Identifier: GPL-2.0
/* kmod/reclaim.c with a plan, and with the answers of a provider, that a test gives. */

#include "worker.h"
#include "plan.h"
#include "reclaim.h"

#define MOST	16

/* One target of the plan, in the plan's order: its answer, and what was done about it. */
struct each {
	u64 nbytes, below_low;
	u64 moved, took_ms;	/* of the answer */
	int64_t err, exits;
	u64 asked, low, pressed;
};

unsigned long jiffies;

static struct ggroup_device device = { .queue = { true } };
static struct ggroup groups[MOST];
static struct ggroup_target targets_of[MOST];
static struct each *each;
static unsigned int count;

static struct each *each_of(const struct ggroup *group)
{
	return &each[group->id - 1];
}

struct ggroup *ggroup_group_find(u64 id)
{
	return &groups[id - 1];
}

void ggroup_group_get(struct ggroup *group)
{
	(void)group;
}

void ggroup_group_put(struct ggroup *group)
{
	(void)group;
}

u64 ggroup_group_held(const struct ggroup *group)
{
	(void)group;
	return 0;
}

u64 ggroup_group_limit(const struct ggroup *group)
{
	(void)group;
	return GGROUP_MAX;
}

struct ggroup *ggroup_group_next_pre(struct ggroup *pos, const struct ggroup *top)
{
	(void)pos, (void)top;
	return NULL;
}

bool ggroup_process_exited(const struct ggroup *group)
{
	return group->exited;
}

void ggroup_event_count(struct ggroup *group, unsigned int event)
{
	each_of(group)->low += event == GGROUP_EVENT_LOW;
}

void ggroup_usermem_press(struct ggroup *group, u64 nbytes)
{
	each_of(group)->pressed += nbytes;
}

u64 ggroup_lever_reclaiming(struct ggroup *group)
{
	(void)group;
	return 0;
}

int ggroup_lever_command(struct ggroup *group, enum ggroup_lever_kind kind, u64 value, u32 timeout_ms, u64 *result)
{
	struct each *one = each_of(group);

	(void)kind, (void)timeout_ms;
	one->asked += value;
	jiffies += one->took_ms;
	group->exited = one->exits;
	*result = one->moved;
	return (int)one->err;
}

int ggroup_plan_make(struct ggroup *top, u64 nbytes, struct ggroup_targets *targets)
{
	(void)top, (void)nbytes;
	*targets = (struct ggroup_targets) { targets_of, count };
	return 0;
}

void ggroup_plan_free(struct ggroup_targets *targets)
{
	(void)targets;
}

/* Return the result of the call; store the bytes that it reports in `moved`. */
int worker_reclaim(struct each *given, unsigned int number, u32 timeout_ms, u64 *moved)
{
	struct ggroup top = { .device = &device, .alive = true };

	each = given;
	count = number;
	for (unsigned int i = 0; i < number; i++) {
		groups[i] = (struct ggroup) { .id = i + 1, .alive = true, .device = &device,
					     .kind = GGROUP_KIND_PROCESS };
		targets_of[i] = (struct ggroup_target) {
			.id = i + 1, .nbytes = given[i].nbytes,
			.flags = given[i].below_low ? GGROUP_TARGET_BELOW_LOW : 0,
		};
	}
	return ggroup_reclaim_below(&top, 1, timeout_ms, moved);
}
