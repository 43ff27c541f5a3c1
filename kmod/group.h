/* SPDX-License-Identifier: GPL-2.0 */
/* A group: a process, a slice, or the root that stands for a GPU. */
#ifndef GGROUP_GROUP_H
#define GGROUP_GROUP_H

#include <linux/atomic.h>
#include <linux/compiler.h>
#include <linux/cred.h>
#include <linux/list.h>
#include <linux/pid.h>
#include <linux/rcupdate.h>
#include <linux/refcount.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "counters.h"
#include "device.h"
#include "event.h"
#include "lever.h"
#include "peak.h"
#include "uapi/ggroup.h"
#include "usermem.h"

#define GGROUP_EVENTS		(GGROUP_EVENT_FAIL + 1)

/**
 * struct ggroup - a group
 * @ref: held by the tree, by files, by works, and by whoever looks at it
 * @rcu: freed after a grace period, since ids are looked up without a lock
 * @id: its name, never used again
 * @kind: GGROUP_KIND_*
 * @device: its GPU, with a reference
 * @user: whom it is counted for; see quota.h
 * @depth: levels below the root
 * @born_ns: when it was made, by the monotonic clock
 * @alive: in the tree (changed with the device's lock held for writing)
 * @dead: the process exited
 * @parent: the group above, NULL for a root; it cannot leave the tree before this one
 * @children: groups below, in the order in which they came
 * @sibling: among the parent's children
 * @name: in the device's table of processes or slices
 * @path: slice: its path; else NULL
 * @pid: process: who; else NULL
 * @start: process: clock ticks since boot, as /proc says to who added it
 * @exit_wait: process: on the pid's queue, which is woken when it exits
 * @exit_work: process: what an exit has to do and the waker cannot
 * @joined: process: files that joined
 * @reclaim_work: brings the group back under its high, where a tenant's charge lifted it over
 * @current_bytes: on the GPU; this and what follows but @events: see the device's @figures
 * @swap: in the host
 * @peaks: the highest @current_bytes and @swap, by GGROUP_PEAK_*
 * @swapin_bytes: moved to the GPU, ever
 * @swapout_bytes: moved to the host, ever
 * @swapins: moves to the GPU, ever
 * @swapouts: moves to the host, ever
 * @move_usec: what the moves took
 * @events: counts by GGROUP_EVENT_*
 * @marks: files that have reset a peak; this and the next: see peak.c
 * @marks_counted: how many of them are not root's
 *
 * Then the settings, as settings.def has them; these and the owner are written with the device's
 * lock held for writing.
 *
 * @owner: slice: who controls what is below it
 * @gid: slice: kept for the daemon
 * @usermem: the pressure channel
 * @inbox: events that the listener has not read
 * @levers: process: what the provider was asked for
 * @counters: process: the mapped page
 * @scratch: of whoever holds the device's lock for writing
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
#undef GGROUP_SETTING
	kuid_t owner;
	kgid_t gid;

	struct ggroup_usermem usermem;
	struct ggroup_inbox inbox;
	struct ggroup_lever levers[GGROUP_LEVERS];
	struct ggroup_counter_page counters;

	struct {
		u64 sum;	/* of what its children give, or ask for */
		u64 low;	/* effective low */
		u64 room;	/* granules that its swap_max still lets go */
		u64 spare;	/* granules that it can give */
		u64 taken;	/* granules that a plan has taken */
		u64 over;	/* bytes over its own high */
		unsigned int order;	/* among the leaves */
	} scratch;
};

/*
 * The groups at or below @top, each after those above it, in the order in which they came; NULL
 * after the last.
 */
struct ggroup *ggroup_next_pre(struct ggroup *pos, const struct ggroup *top);
/* ... each after those below it. Start with ggroup_first_post(). */
struct ggroup *ggroup_first_post(struct ggroup *top);
struct ggroup *ggroup_next_post(struct ggroup *pos, const struct ggroup *top);

/* The group of an id, with a reference; NULL for none. It may have left the tree: see @alive. */
struct ggroup *ggroup_find(u64 id);
/* A GPU by the id of its root, with a reference to the root. */
struct ggroup *ggroup_find_root(u64 id);
struct ggroup *ggroup_get(struct ggroup *group);
void ggroup_put(struct ggroup *group);

/* A group that nobody finds yet; NULL where there is no memory. */
struct ggroup *ggroup_new(struct ggroup_device *device, u32 kind);
/*
 * From here on it is found by its id, and the tree holds the caller's reference. With the device's
 * lock held for writing, unless the device is new.
 */
int ggroup_enter(struct ggroup *group, struct ggroup *parent);
/* The root of a new device, whose @high is the capacity. ERR_PTR(-ENOMEM), ERR_PTR(-ENOSPC). */
struct ggroup *ggroup_new_root(struct ggroup_device *device, u64 capacity);
/* Control: see the header of the ABI. */
int ggroup_next(struct ggroup_group *arg);
int ggroup_move(struct ggroup *group, u64 parent);
/*
 * Leaves the tree with its charges; -EBUSY. This and what follows: with the device's lock held
 * for writing.
 */
int ggroup_remove(struct ggroup *group);
/* Removes processes that exited, since nobody else is left to. */
void ggroup_reap(struct ggroup_device *device);
/* Takes everything out of the tree, the root last. */
void ggroup_close_all(struct ggroup_device *device);
/* Whether the caller owns a slice above. With the device's lock held. */
bool ggroup_owned(const struct ggroup *group);
/* As @file knows them. With the device's lock held. */
void ggroup_get_books(struct ggroup *group, const struct ggroup_file *file,
		      struct ggroup_books *books);
/* @admin: the caller may set whose a slice is, too. */
int ggroup_set(struct ggroup *group, const struct ggroup_set *set, bool admin);

/* Bytes on the GPU; a moment ago, unless figures stand still. */
static inline u64 ggroup_held(const struct ggroup *group)
{
	return READ_ONCE(group->current_bytes);
}

/* The module goes: there are none left. */
void ggroup_group_exit(void);

#endif
