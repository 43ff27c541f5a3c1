/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The SMs of a GPU in groups, and contexts on some of the groups (CUDA's green contexts).
 *
 * The groups come from one split of all SMs into the smallest parts that the hardware has, which the driver makes in
 * the same way in each process: so the daemon can name groups by their numbers. A green context shares memory and code
 * with the primary context of its GPU, and with no other context.
 */
#ifndef GGROUP_CUDA_GREEN_H
#define GGROUP_CUDA_GREEN_H

#include <stdbool.h>
#include <stdint.h>

#include "api.h"

/* Most groups that have a number: bits of a mask. A GPU with more has the rest only for work without a limit. */
#define GREEN_GROUPS 64

struct green_shape {
	unsigned int groups;	/* that a mask can name */
	unsigned int each;	/* SMs in each of them */
	unsigned int all;	/* SMs of the GPU */
};

/* A context on some groups. It lives until green_end. */
struct green {
	struct green *next;
	uint64_t mask;		/* the groups: bit i is the group of number i */
	CUgreenCtx handle;
	CUcontext context;	/* the same, for calls that take a context */
};

/* Return how the SMs of a GPU are split; CUDA_ERROR_NOT_SUPPORTED where the driver has no green contexts. */
CUresult green_shape(CUdevice ordinal, struct green_shape *shape);
/* Return the primary context of a GPU; NULL where it is not in use. */
CUcontext green_primary(CUdevice ordinal);
/* Return the context on these groups, made on first use; NULL where the driver makes none. Its primary context has to
 * be in use: else this one would keep it. */
struct green *green_on(CUdevice ordinal, uint64_t mask);
/* Return the GPU whose green contexts keep this primary context alive; -1: none. */
CUdevice green_keeps(CUcontext primary);
/* Destroy all of a GPU, whose streams and events are gone. */
void green_end(CUdevice ordinal);

/* Make an event for streams of `context`; NULL on failure. */
CUevent green_event(CUcontext context);

#endif
