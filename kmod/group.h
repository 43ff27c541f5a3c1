/* SPDX-License-Identifier: GPL-2.0 */
/* A group: a process, a slice, or the root that stands for a GPU. */
#ifndef GGROUP_GROUP_H
#define GGROUP_GROUP_H

#include <linux/atomic.h>
#include <linux/compiler.h>
#include <linux/cred.h>
#include <linux/list.h>
#include <linux/minmax.h>
#include <linux/pid.h>
#include <linux/rcupdate.h>
#include <linux/refcount.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "counters.h"
#include "event.h"
#include "lever.h"
#include "peak.h"
#include "queue.h"
#include "uapi/ggroup.h"
#include "usermem.h"

struct ggroup_device;

#define GGROUP_EVENTS		(GGROUP_EVENT_OOM_GROUP_KILL + 1)

/**
 * struct ggroup - a group
 * @ref: held by the tree, by files, by works, and by users of the group
 * @rcu: for freeing after a grace period, since ids are looked up without a lock
 * @id: its name, never used again
 * @kind: GGROUP_KIND_*
 * @device: its GPU, with a reference
 * @user: the user that it is counted for; see quota.h
 * @depth: levels below the root
 * @born_ns: when it was made, by the monotonic clock
 * @alive: in the tree (changed with the device's lock held for writing)
 * @dead: the process exited
 * @parent: the group above, NULL for a root; it cannot leave the tree before this one
 * @children: groups below, in the order in which they came
 * @sibling: among the parent's children
 * @name: in the device's table of processes or slices
 * @path: slice: its path; else NULL
 * @pid: process: its pid; else NULL
 * @start: process: clock ticks since boot, as /proc showed it to the program that added the group
 * @exit_wait: process: on the pid's queue, which is woken when it exits
 * @exit_work: process: the part of an exit's work that the waker cannot do
 * @joined: process: number of files that joined
 * @reclaim_work: brings the group back under its high, after a tenant's charge lifted it over
 * @current_bytes: bytes on the GPU; this and the following, except @events: see the device's
 *	@figures
 * @swap: bytes in the host
 * @peaks: the highest @current_bytes and @swap, by GGROUP_PEAK_*
 * @swapin_bytes: bytes moved to the GPU, ever
 * @swapout_bytes: bytes moved to the host, ever
 * @swapins: number of moves to the GPU, ever
 * @swapouts: number of moves to the host, ever
 * @move_usec: time that the moves took
 * @events: counts by GGROUP_EVENT_*
 * @marks: files that have reset a peak; this and the next: see peak.c
 * @marks_counted: number of them that are not root's
 *
 * Then the settings, as settings.def has them; these and the owner are written with the device's
 * lock held for writing.
 *
 * @owner: slice: the user that controls the groups below it
 * @gid: slice: kept for the daemon
 * @usermem: the pressure channel
 * @inbox: events that the listener has not read
 * @levers: process: states of the levers, and commands to the provider
 * @counters: process: the mapped page
 * @off_all: process: GGROUP_REASON_* that take it off the runlist with all engines; this and the
 *	next are written with the device's lock held for writing
 * @off_gr: process: those that take the GR engine alone
 * @next_use: process: how soon it uses its memory again, GGROUP_NEXT_USE_*; this and the next are
 *	written with the device's lock held for writing
 * @next_use_ns: time when @next_use was told
 * @scratch: for the holder of the device's lock for writing
 */
struct ggroup {
	refcount_t ref;
	struct rcu_head rcu;
	u64 id;
	u32 kind;
	struct ggroup_device *device;
	kuid_t user;
	unsigned int depth;
	u64 born_ns;
	bool alive;
	bool dead;
	struct ggroup *parent;
	struct list_head children;
	struct list_head sibling;
	struct hlist_node name;
	char *path;
	struct pid *pid;
	u64 start;
	wait_queue_entry_t exit_wait;
	struct work_struct exit_work;
	atomic_t joined;
	struct work_struct reclaim_work;

	u64 current_bytes;
	u64 swap;
	struct ggroup_peak peaks[GGROUP_PEAKS];
	u64 swapin_bytes;
	u64 swapout_bytes;
	u64 swapins;
	u64 swapouts;
	u64 move_usec;
	atomic64_t events[GGROUP_EVENTS];
	struct list_head marks;
	unsigned int marks_counted;

#define GGROUP_SETTING(field, type, bit, least, most, initial, kinds)	type field;
#include "settings.def"
	kuid_t owner;
	kgid_t gid;

	struct ggroup_usermem usermem;
	struct ggroup_inbox inbox;
	struct ggroup_lever levers[GGROUP_LEVERS];
	struct ggroup_counter_page counters;
	u32 off_all;
	u32 off_gr;
	u32 next_use;
	u64 next_use_ns;

	struct {
		u64 sum;	/* of what its children give, or ask for */
		u64 low;	/* effective low */
		u64 room;	/* granules that its swap_max still allows in the host */
		u64 spare;	/* granules that it can give */
		u64 taken;	/* granules that a plan has taken */
		u64 over;	/* bytes over its own high */
		unsigned int order;	/* position among the leaves */
		u32 next_use;	/* GGROUP_NEXT_USE_* that is valid now */
	} scratch;
};

/**
 * ggroup_group_next_pre() - step through a subtree, each group after those above it
 * @pos: the group to go on from; @top at first
 * @top: the group at the top of the subtree
 *
 * Context: the device's lock is held.
 * Return: the next group, children in the order in which they came; NULL after the last.
 */
struct ggroup *ggroup_group_next_pre(struct ggroup *pos, const struct ggroup *top);

/**
 * ggroup_group_first_post() - begin to step through a subtree, each group after those below it
 * @top: the group at the top of the subtree
 *
 * Context: the device's lock is held.
 * Return: the first group for ggroup_group_next_post().
 */
struct ggroup *ggroup_group_first_post(struct ggroup *top);

/**
 * ggroup_group_next_post() - step through a subtree, each group after those below it
 * @pos: the group to go on from; that of ggroup_group_first_post() at first
 * @top: the group at the top of the subtree
 *
 * Context: the device's lock is held.
 * Return: the next group; NULL after @top.
 */
struct ggroup *ggroup_group_next_post(struct ggroup *pos, const struct ggroup *top);

/**
 * ggroup_group_find() - look a group up by its id
 * @id: its id
 *
 * Return: the group, with a reference, even if it has left the tree (see @alive); NULL for none.
 */
struct ggroup *ggroup_group_find(u64 id);

/**
 * ggroup_group_find_root() - look a GPU up by the id of its root
 * @id: the id of a root
 *
 * Return: the root, with a reference; NULL for none.
 */
struct ggroup *ggroup_group_find_root(u64 id);

/**
 * ggroup_group_next() - do GGROUP_IOC_NEXT, as the ABI has it
 * @arg: its arguments
 *
 * Return: 0, -ENODEV or -ENOENT.
 */
int ggroup_group_next(struct ggroup_group *arg);

/**
 * ggroup_group_get() - take a reference
 * @group: a group that the caller has a reference to
 *
 * Return: @group.
 */
struct ggroup *ggroup_group_get(struct ggroup *group);

/**
 * ggroup_group_put() - drop a reference
 * @group: the group, which is freed with the last one
 */
void ggroup_group_put(struct ggroup *group);

/**
 * ggroup_group_insert() - make a group findable by its id
 * @group: a new group
 *
 * Return: 0 or -ENOMEM.
 */
int ggroup_group_insert(struct ggroup *group);

/**
 * ggroup_group_erase() - make a group unfindable by its id
 * @group: the group
 */
void ggroup_group_erase(struct ggroup *group);

/**
 * ggroup_group_owned() - check whether the calling user owns a slice above
 * @group: the group
 *
 * Context: the device's lock is held.
 * Return: true for the nearest owner above, if that is a user other than root.
 */
bool ggroup_group_owned(const struct ggroup *group);

/**
 * ggroup_group_held() - get the bytes that a group has on the GPU
 * @group: the group
 *
 * Return: bytes, of a moment ago unless figures stand still.
 */
static inline u64 ggroup_group_held(const struct ggroup *group)
{
	return READ_ONCE(group->current_bytes);
}

/**
 * ggroup_group_limit() - get the level that reclaim brings a group under
 * @group: the group
 *
 * Return: bytes: the lower of its high and its limit_max.
 */
static inline u64 ggroup_group_limit(const struct ggroup *group)
{
	return min(group->high, group->limit_max);
}

/**
 * ggroup_group_exit() - tear down, as the module is unloaded; there are no groups left
 */
void ggroup_group_exit(void);

#endif
