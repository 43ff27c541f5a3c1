/* SPDX-License-Identifier: Apache-2.0 */
/* The entry points of the driver, and of NVML, that are caught, with their wrappers. */
#ifndef GGROUP_CUDA_CAUGHT_H
#define GGROUP_CUDA_CAUGHT_H

#include <stdbool.h>

/* Return whether an entry point of this name, with its suffix, is caught. */
bool caught_is(const char *name);
/* Return whether the program has loaded the library that has a name: libcuda, or NVML. */
bool caught_loaded(const char *name);
/* Return the wrapper of the function at `pointer` in either of them; NULL for one that is not caught. */
void *caught_at(const void *pointer);
/* The same, where nothing may be looked up: NULL for a function that is not known yet. */
void *caught_behind(const void *pointer);
/* Return the wrapper of a name; NULL where the driver, or NVML, lacks it. */
void *caught_wrapper(const char *name);
/* Return the wrapper that the library exports under a name, whether or not the driver has it. */
void *caught_exported(const char *name);
/* Return the wrapper that cuGetProcAddress gives for a name without suffix; NULL for one that is not caught. */
void *caught_named(const char *base, int version, bool per_thread);

#endif
