/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run of chunks of a region, and all the addresses at which it is mapped: those of the region, or the views of an
 * object. For a thread that has all the chunks of the run. If a handle of the driver's holds an object as a whole, a
 * run is all of it.
 */
#ifndef GGROUP_CUDA_PLACE_H
#define GGROUP_CUDA_PLACE_H

#include "chunk.h"

struct view;

/* While a chunk is bare it is mapped nowhere but at its window, and the functions below take it as it is: there is
 * nothing to unmap, and once it is mapped it is bare no more. Never one of an object. */

/* Bytes that one call makes accessible, unless one handle of the driver's holds more. To make 64 MiB of the host
 * accessible takes 1 ms under the driver's lock (measured on an H200); levers and other programs wait for that long. */
#define PLACE_RUN_BYTES (64 * GG_MIB)

/* Consecutive chunks. */
struct place_run {
	struct region *region;
	size_t first, count;
};

/* Unmaps the run everywhere, or nowhere; false: nowhere. */
bool place_leave(const struct place_run *run);
/* The chunks of a run that place_leave has left, and that go to the host, are bare from now on. */
void place_bare(const struct place_run *run);
bool place_is_bare(const struct region *region, size_t index);
/* Unmaps all of a region that is not an object, for good, so that nothing of it is bare; false: all of it is mapped
 * still. By the thread that frees it. */
bool place_leave_region(struct region *region);
/* Maps `memory`, one handle per chunk, everywhere, with the access set there; NULL: the memory that the books say. On
 * an error it is mapped nowhere. */
CUresult place_enter(const struct place_run *run, const CUmemGenericAllocationHandle *memory);
/* The same, with one handle of the driver's for all of an object. */
CUresult place_enter_whole(const struct place_run *run, CUmemGenericAllocationHandle whole);
/* Maps an object's memory, by the books, for one view alone, which is not mapped yet. */
CUresult place_enter_view(const struct view *view);

#endif
