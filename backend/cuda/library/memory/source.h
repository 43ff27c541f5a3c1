/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools that the program has made: the location of their memory, and whether the library places it, as it does for the
 * default pools (async.h). The driver places it where other processes can have the pool, where the pool has a size of
 * its own, and once another GPU was given access to it, which would otherwise reach everything that the library places.
 */
#ifndef GGROUP_CUDA_SOURCE_H
#define GGROUP_CUDA_SOURCE_H

#include <stdbool.h>

#include "api.h"

struct source {
	CUmemAllocationType type;
	CUmemLocation location;
	struct usage *usage;	/* the library's use of it; NULL: it never places any */
	bool ours;		/* whether the library places allocations from now on */
};

/* Note that a pool was made. Without memory for that, it stays unknown. */
void source_enter(CUmemoryPool pool, const CUmemPoolProps *props);
/* Take what is known of a pool that is about to be destroyed, or NULL; to be given back where it was not, else to be
 * freed. */
struct source *source_take(CUmemoryPool pool);
void source_give_back(CUmemoryPool pool, struct source *source);
/* Find what is known of a pool; false for one of the driver's, or another process's. */
bool source_find(CUmemoryPool pool, struct source *found);
/* Have the driver place allocations from a pool from now on. */
void source_leave(CUmemoryPool pool);

#endif
