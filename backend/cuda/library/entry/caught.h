/* SPDX-License-Identifier: Apache-2.0 */
/* Which entry points of the driver, and of NVML, are caught, and the wrapper of each. */
#ifndef GGROUP_CUDA_CAUGHT_H
#define GGROUP_CUDA_CAUGHT_H

#include <stdbool.h>

/* Whether a name, with its suffix, is one that is caught. */
bool caught_is(const char *name);
/* Whether the program has loaded what has that name: libcuda, or NVML. */
bool caught_loaded(const char *name);
/* The wrapper of what is at `pointer` in one of both; NULL: not one that is caught. */
void *caught_at(const void *pointer);
/* The same, where nothing may be looked for: of what is not known yet it is NULL. */
void *caught_behind(const void *pointer);
/* The wrapper of a name; NULL where the driver, or NVML, lacks it. */
void *caught_wrapper(const char *name);
/* The wrapper of a name in any case: what our library exports under it. */
void *caught_exported(const char *name);
/* The wrapper that cuGetProcAddress is to give for a name without suffix; NULL: not one that is caught. */
void *caught_named(const char *base, int version, bool per_thread);

#endif
