/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools that the program has made: where what is allocated from them is; and whether that is ours to place, as it is of the
 * default pools (async.h). It is not where other processes can have the pool, where it has a size of its own, and
 * from when on another GPU has access to it: else that would have access to all that we place.
 */
#ifndef GGROUP_CUDA_SOURCE_H
#define GGROUP_CUDA_SOURCE_H

#include <stdbool.h>

#include "api.h"

struct source {
	CUmemAllocationType type;
	CUmemLocation location;
	struct usage *usage;	/* what is ours of it; NULL: nothing ever is */
	bool ours;		/* what is allocated from now on is */
};

/* One was made. Without memory for that nothing is known of it. */
void source_enter(CUmemoryPool pool, const CUmemPoolProps *props);
/* One is about to go: what was known of it, or NULL; to be given back where it has not gone, else to be freed. */
struct source *source_take(CUmemoryPool pool);
void source_give_back(CUmemoryPool pool, struct source *source);
/* False: it is a pool of the driver's, or another process's. */
bool source_find(CUmemoryPool pool, struct source *found);
/* What is allocated from it from now on is the driver's. */
void source_leave(CUmemoryPool pool);

#endif
