/* SPDX-License-Identifier: GPL-2.0 */
/* Userspace stand-ins for what kmod/plan.c uses of the kernel and of the module's other files. */
#ifndef PLAN_KERNEL_H
#define PLAN_KERNEL_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "uapi/ggroup.h"

typedef uint64_t u64;
typedef uint32_t u32;

#define U64_MAX		UINT64_MAX
#define NSEC_PER_SEC	1000000000L
#define GFP_KERNEL	0
#define min(a, b)	({ __typeof__(a) _a = (a); __typeof__(b) _b = (b); _a < _b ? _a : _b; })
#define max(a, b)	({ __typeof__(a) _a = (a); __typeof__(b) _b = (b); _a > _b ? _a : _b; })
#define READ_ONCE(x)	(x)
#define div64_u64(a, b)	((a) / (b))
#define mul_u64_u64_div_u64(a, b, c)	((u64)((unsigned __int128)(a) * (b) / (c)))
#define sort(base, count, size, compare, swap)	qsort(base, count, size, compare)
#define kvmalloc_array(n, size, flags)	calloc(n, size)
#define kvcalloc(n, size, flags)	calloc(n, size)
#define kvfree(p)	free(p)
#define lockdep_assert_held_write(lock)	((void)(lock))
#define down_write(lock)	((void)(lock))
#define up_write(lock)	((void)(lock))

/* Lists as in <linux/list.h>, as far as the walk needs them. */
struct list_head {
	struct list_head *next, *prev;
};

#define list_empty(head)	((head)->next == (head))

struct ggroup_device {
	int lock;
	u64 granule;
	unsigned int groups;
};

struct ggroup {
	u64 id;
	u32 kind;
	bool alive;
	struct ggroup_device *device;
	struct ggroup *parent;
	struct list_head children;
	struct list_head sibling;
	u64 current_bytes;
	u64 swap;
	u64 high;
	u64 low;
	u64 swap_max;
	u32 next_use;
	u64 next_use_ns;
	struct {
		u64 sum, low, room, spare, taken, over;
		unsigned int order;
		u32 next_use;
	} scratch;
};

static inline u64 ggroup_group_held(const struct ggroup *group)
{
	return group->current_bytes;
}

u64 ktime_get_ns(void);
struct ggroup *ggroup_group_find(u64 id);
void ggroup_group_put(struct ggroup *group);
struct ggroup *ggroup_group_next_pre(struct ggroup *pos, const struct ggroup *top);
struct ggroup *ggroup_group_first_post(struct ggroup *top);
struct ggroup *ggroup_group_next_post(struct ggroup *pos, const struct ggroup *top);

#endif
