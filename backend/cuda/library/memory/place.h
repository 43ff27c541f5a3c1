/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run of chunks of a region, at all the addresses where it is mapped: those of the region, or the views of an object.
 * By a thread that has all the chunks of the run. Of an object that the driver's handle is behind a run is all of it.
 */
#ifndef GGROUP_CUDA_PLACE_H
#define GGROUP_CUDA_PLACE_H

#include "chunk.h"

struct view;

/* Neighbours. */
struct place_run {
	struct region *region;
	size_t first, count;
};

/* Unmaps it everywhere, or nowhere; false: nowhere. */
bool place_leave(const struct place_run *run);
/* Maps `memory`, one a chunk, everywhere, with the access that it has there; NULL: what is behind it by the books. An
 * error leaves it mapped nowhere. */
CUresult place_enter(const struct place_run *run, const CUmemGenericAllocationHandle *memory);
/* The same with one handle of the driver's behind all of an object. */
CUresult place_enter_whole(const struct place_run *run, CUmemGenericAllocationHandle whole);
/* ... and what is behind an object by the books, for one view alone, which is mapped nowhere. */
CUresult place_enter_view(const struct view *view);

#endif
