/* SPDX-License-Identifier: GPL-2.0 */
/* A GPU: its tree of groups, and the queue of commands to its provider. */
#ifndef GGROUP_DEVICE_H
#define GGROUP_DEVICE_H

#include <linux/hashtable.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/rwsem.h>
#include <linux/spinlock.h>
#include <linux/string.h>

#include "event.h"
#include "queue.h"
#include "uapi/ggroup.h"

struct ggroup;

#define GGROUP_HASH_BITS	8
#define GGROUP_QUOTA_BITS	6

/**
 * struct ggroup_device - a GPU
 * @ref: held by the register, by every group, and by users of the GPU
 * @node: in the register
 * @uuid: its name
 * @lock: protects the tree, its limits and its figures. Held for writing by code that changes the
 *	tree or a limit, or must see figures that belong together; for reading, with @figures, by
 *	code that checks and changes those of one path. May be held while memory is allocated and
 *	never while waiting for a program
 * @figures: protects the figures of all groups, while @lock is held for reading; inside it, a leaf
 *	except for the lists of peak.c
 * @gone: closed: no group can be found or added any more (under @lock)
 * @root: the group that stands for it
 * @granule: bytes that move together
 * @headroom: bytes below a high at which the workers begin; see reclaim_start()
 * @groups: number of groups, the root included
 * @processes: groups of processes, by their struct pid
 * @slices: groups of slices, by their path
 * @quotas: users that have groups, by their uid
 * @queue: commands, and the provider that serves them
 * @stream: events, and the listener that reads them
 */
struct ggroup_device {
	struct kref ref;
	struct list_head node;
	char uuid[GGROUP_UUID_LEN];
	struct rw_semaphore lock;
	spinlock_t figures;	/* inside lock */
	bool gone;
	struct ggroup *root;
	u64 granule;
	u64 headroom;
	unsigned int groups;
	DECLARE_HASHTABLE(processes, GGROUP_HASH_BITS);
	DECLARE_HASHTABLE(slices, GGROUP_HASH_BITS);
	DECLARE_HASHTABLE(quotas, GGROUP_QUOTA_BITS);
	struct ggroup_queue queue;
	struct ggroup_stream stream;
};

/**
 * ggroup_device_is_uuid() - check whether a UUID ends within its field
 * @uuid: the field, as a program gave it: GGROUP_UUID_LEN bytes
 *
 * Return: true for a UUID that does.
 */
static inline bool ggroup_device_is_uuid(const char *uuid)
{
	return strnlen(uuid, GGROUP_UUID_LEN) < GGROUP_UUID_LEN;
}

/**
 * ggroup_device_get() - take a reference
 * @device: a GPU that the caller has a reference to
 *
 * Return: @device.
 */
struct ggroup_device *ggroup_device_get(struct ggroup_device *device);

/**
 * ggroup_device_put() - drop a reference
 * @device: the GPU, which is freed with the last one
 */
void ggroup_device_put(struct ggroup_device *device);

#endif
