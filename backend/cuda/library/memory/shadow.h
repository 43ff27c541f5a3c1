/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shadow of an allocation of managed memory: the program's advice about it and its last prefetch, as the driver
 * would keep them, by spans of pages. It makes no call of the driver. The library's own advice (hint.h) is not in it.
 *
 * For a thread that has the allocation to itself, or holds the lock that the others wait for.
 */
#ifndef GGROUP_CUDA_SHADOW_H
#define GGROUP_CUDA_SHADOW_H

#include "device.h"

/* The state that the program has asked for. */
struct advice {
	bool mostly_read, prefers, by_host, fetched;
	CUmemLocation preferred, last;
	uint64_t by;		/* GPUs, a bit an ordinal */
};

/* The advice from an address to the start of the next span. */
struct span {
	CUdeviceptr start;
	struct advice advice;
};

struct shadow {
	CUdeviceptr start, end;	/* the end in whole pages */
	struct span *spans;	/* by address; the first begins at the start */
	size_t count, room;	/* of spans */
};

/* What all pages of a range agree on. */
struct agreed {
	bool first, mostly_read, prefers, fetched, by_host;
	CUmemLocation preferred, last;
	uint64_t by;
};

/* Begin without advice; false without memory. */
bool shadow_begin(struct shadow *shadow, CUdeviceptr start, uint64_t bytes);
void shadow_end(struct shadow *shadow);

/* Narrow a range to its whole pages that are in the allocation; false: none is. */
bool shadow_within(const struct shadow *shadow, CUdeviceptr *start, CUdeviceptr *end);
/* Note advice, and a prefetch, for the part of a range that is in the allocation. Without memory they are not noted. */
void shadow_advise(struct shadow *shadow, CUdeviceptr start, CUdeviceptr end, CUmem_advise what,
		   const CUmemLocation *location);
void shadow_fetch(struct shadow *shadow, CUdeviceptr start, CUdeviceptr end, const CUmemLocation *location);
/* Call for each span of a range in the allocation, clipped to it, until one call fails; returns that error. */
CUresult shadow_each(const struct shadow *shadow, CUdeviceptr start, CUdeviceptr end,
		     CUresult (*call)(CUdeviceptr start, uint64_t bytes, const struct advice *, const void *argument),
		     const void *argument);

struct agreed shadow_agreed(struct shadow *shadow, CUdeviceptr start, CUdeviceptr end);
/* Answer as cuMemRangeGetAttribute does; `size` bytes at `number`. */
CUresult shadow_answer(const struct agreed *agreed, CUmem_range_attribute attribute, int *number, size_t size);

#endif
