/* SPDX-License-Identifier: Apache-2.0 */
/* The library as a whole: its first call, and fork. */
#ifndef GGROUP_CUDA_LIBRARY_H
#define GGROUP_CUDA_LIBRARY_H

#include <stdbool.h>

/* Runs before the first entry point does anything, once a process, and again in a child after fork(). It finds the
 * driver, and starts nothing: the thread and the socket come with the first device that is used (listener.c). */
extern bool library_ready; /* atomically read and written */
void library_begin_slowly(void);
static inline void library_begin(void)
{
	if (!__atomic_load_n(&library_ready, __ATOMIC_ACQUIRE))
		library_begin_slowly();
}

#endif
