/* SPDX-License-Identifier: Apache-2.0 */
/* Which entry points of the driver are caught, and the wrapper of each. */
#ifndef GGROUP_CUDA_CAUGHT_H
#define GGROUP_CUDA_CAUGHT_H

#include <stdbool.h>

/* Whether a name, with its suffix, is one that is caught. */
bool caught_is(const char *name);
/* The wrapper of what is at `pointer` in libcuda; NULL: not one that is caught. */
void *caught_at(const void *pointer);
/* The wrapper of a name; NULL where the driver lacks it. */
void *caught_wrapper(const char *name);
/* The wrapper of a name in any case: what our library exports under it. */
void *caught_exported(const char *name);
/* The wrapper that cuGetProcAddress is to give for a name without suffix; NULL: not one that is caught. */
void *caught_named(const char *base, int version, bool per_thread);

#endif
