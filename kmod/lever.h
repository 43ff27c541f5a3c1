/* SPDX-License-Identifier: GPL-2.0 */
/* What can be moved of a process, and whoever waits for that. */
#ifndef GGROUP_LEVER_H
#define GGROUP_LEVER_H

#include <linux/list.h>
#include <linux/types.h>

#include "provider.h"

struct ggroup;

/**
 * struct ggroup_lever - one lever of one process. All under the lock of the device's queue
 * @order: on the queue while there is something to command, and no command in flight
 * @asking: whoever asked for what was not read yet, in the order in which they did
 * @awaiting: whoever asked for what is in flight
 * @held: what holds now: acknowledged, and not said to be released since
 * @settled: last acknowledged, by any provider: what the next one is told
 * @sent: what the command in flight says
 * @flight: number of the command in flight, which was read and not answered; 0 for none
 * @owed: this provider has not been told @settled yet
 * @doubtful: it was told to move, and failed, or the provider went without an answer
 *
 * What is commanded is what the last one asking asked for (RECLAIM: the first, and for himself
 * alone), so a command that was not read yet is replaced by a later one, and is there again if that
 * is given up. A command that failed, or that nobody waits for any more before it was read, leaves
 * no trace: who asked was told, and a process must not be frozen by it later. One in flight cannot
 * be taken back, so its answer counts even when it comes too late for who asked.
 */
struct ggroup_lever {
	struct ggroup_order order;
	struct list_head asking;
	struct list_head awaiting;
	u64 held;
	u64 settled;
	u64 sent;
	u64 flight;
	bool owed;
	bool doubtful;
};

void ggroup_levers_init(struct ggroup_lever *levers);

/*
 * Has a lever of a process moved, and waits for the answer. No lock may be held. See the ABI for
 * errors; -ESRCH for a process that exited. @result is only written on success, and may be NULL.
 */
int ggroup_command(struct ggroup *group, enum ggroup_lever_kind kind, u64 value, u32 timeout_ms,
		   u64 *result);
/* Bytes that reclaims in progress are about to take from a process; at most GGROUP_MAX. */
u64 ggroup_reclaiming(struct ggroup *group);
/*
 * The group left the tree (it is not alive any more): its commands are no more, and who waits for
 * them gets -ENODEV.
 */
void ggroup_levers_forget(struct ggroup *group);

/*
 * What the provider makes of it. All with the lock of the queue held.
 *
 * It reads the command of a lever that is on the queue: that is in flight then, and says @sent.
 */
void ggroup_lever_take(struct ggroup_queue *queue, struct ggroup_lever *lever);
/* It was told nothing: the command is the next one again, unless it was given up meanwhile. */
void ggroup_lever_untake(struct ggroup_queue *queue, struct ggroup_lever *lever);
/* It answered the command in flight. */
void ggroup_lever_settle(struct ggroup_queue *queue, struct ggroup_lever *lever, int status,
			 u64 result);
/* It is new, and knows nothing of what the former ones were told. */
void ggroup_lever_replay(struct ggroup_queue *queue, struct ggroup_lever *lever);
/* It goes; see ggroup_provider_go(). */
void ggroup_lever_bereave(struct ggroup_queue *queue, struct ggroup_lever *lever, bool released);

#endif
