/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mark of the library's own threads and calls. Entry points that the driver calls on its own, and those that the
 * library calls, pass straight through the wrappers.
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
