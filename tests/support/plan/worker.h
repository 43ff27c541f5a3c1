/* SPDX-License-Identifier: GPL-2.0 */
/* Userspace stand-ins for what kmod/reclaim.c uses of the kernel and of the module's other files. */
#ifndef PLAN_WORKER_H
#define PLAN_WORKER_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "uapi/ggroup.h"

typedef uint64_t u64;
typedef uint32_t u32;

#define U64_MAX		UINT64_MAX
#define WQ_UNBOUND	0
#define min(a, b)	({ __typeof__(a) _a = (a); __typeof__(b) _b = (b); _a < _b ? _a : _b; })
#define max(a, b)	({ __typeof__(a) _a = (a); __typeof__(b) _b = (b); _a > _b ? _a : _b; })
#define READ_ONCE(x)	(x)
#define container_of(link, type, member)	((type *)((char *)(link) - offsetof(type, member)))
#define lockdep_assert_held(lock)	((void)(lock))
#define down_write(lock)	((void)(lock))
#define up_write(lock)	((void)(lock))
#define down_read(lock)	((void)(lock))
#define up_read(lock)	((void)(lock))

/* A tick is a millisecond. */
extern unsigned long jiffies;
#define msecs_to_jiffies(ms)	((unsigned long)(ms))
#define jiffies_to_msecs(ticks)	((unsigned int)(ticks))

struct workqueue_struct;
struct work_struct {
	int unused;
};
#define alloc_workqueue(name, flags, most)	((struct workqueue_struct *)1)
#define destroy_workqueue(queue)	((void)(queue))
#define queue_work(queue, work)	((void)(queue), (void)(work), true)

enum ggroup_lever_kind { GGROUP_LEVER_RECLAIM };

struct ggroup_device {
	int lock;
	u64 headroom;
	struct {
		bool online;
	} queue;
};

struct ggroup {
	u64 id;
	u32 kind;
	bool alive;
	bool exited;
	struct ggroup_device *device;
	struct ggroup *parent;
	struct work_struct reclaim_work;
};

u64 ggroup_group_held(const struct ggroup *group);
u64 ggroup_group_limit(const struct ggroup *group);
struct ggroup *ggroup_group_find(u64 id);
void ggroup_group_get(struct ggroup *group);
void ggroup_group_put(struct ggroup *group);
struct ggroup *ggroup_group_next_pre(struct ggroup *pos, const struct ggroup *top);
bool ggroup_process_exited(const struct ggroup *group);
void ggroup_event_count(struct ggroup *group, unsigned int event);
void ggroup_usermem_press(struct ggroup *group, u64 nbytes);
int ggroup_lever_command(struct ggroup *group, enum ggroup_lever_kind kind, u64 value, u32 timeout_ms, u64 *result);
u64 ggroup_lever_reclaiming(struct ggroup *group);

static inline void trace_ggroup_reclaim(u64 id, u64 wanted, u64 moved, int err)
{
	(void)id, (void)wanted, (void)moved, (void)err;
}

#endif
