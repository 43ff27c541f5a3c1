/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether the calling thread is one of ours, or in a call of ours into the driver: entry points that libcuda
 * calls on its own, and those that we call, pass straight through.
 */
#ifndef GGROUP_CUDA_OURS_H
#define GGROUP_CUDA_OURS_H

#include <stdbool.h>

extern __thread unsigned int ours_depth;

static inline bool ours_inside(void)
{
	return ours_depth != 0;
}

static inline void ours_enter(void)
{
	ours_depth++;
}

static inline void ours_leave(void)
{
	ours_depth--;
}

#endif
