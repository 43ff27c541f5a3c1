/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of a generator: each makes one call of an entry point, or the few that belong together, on existing objects. */
#ifndef UNIT_STEPS_H
#define UNIT_STEPS_H

#include <stdint.h>

/* things.c, mapped.c: the program's own physical memory */
void things_make(void);
void things_release(void);
void things_retain(void);
void things_export(void);
void things_close(void);
/* Take over a descriptor from the driver: close it now, or in a later step. */
void things_keep(int fd);
void things_end(void);
void mapped_map(void);
void mapped_unmap(void);
void mapped_allow(void);
void mapped_reserve(void);
void mapped_end(void);

/* plain.c, pools.c: allocations */
void plain_alloc(void);
void plain_free(void);
void plain_refused(void);
void plain_end(void);
void pools_alloc(void);
void pools_make(void);
void pools_destroy(void);
void pools_share(void);
void pools_tell(void);
void pools_ask(void);
void pools_end(void);

/* arrays.c, graphs.c, contexts.c: memory that the driver places, and memory that goes with something else */
void arrays_make(void);
void arrays_destroy(void);
void arrays_map(void);
void arrays_end(void);
void graphs_run(void);
void contexts_come_and_go(void);
void contexts_green(void);
void contexts_primary(void);

/* bound.c, shares.c, opened.c, peers.c: memory that others can reach */
void bound_make(void);
void bound_bind(void);
void bound_unbind(void);
/* Note that a multicast object is gone, or that an allocation was freed. */
struct thing;
void bound_gone(const struct thing *object);
struct plain;
void bound_freed(const struct plain *plain);
void bound_end(void);
void shares_name(void);
void shares_set(void);
void opened_start(void);
void opened_give(void);
void opened_open(void);
void opened_close(void);
void opened_end(void);
/* Give another GPU access, after which no allocation moves any more: near the end. */
void peers_start(void);
void peers_give(void);
void peers_end(void);

/* asked.c */
void asked_physical(void);
void asked_address(void);
void asked_amounts(void);

#endif
