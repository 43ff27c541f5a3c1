/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Names of the driver's handles, as the program has them: their values, unless an object has such a value for its name
 * (object.h). Then the handle gets another name, which every entry point that takes a handle translates back to the
 * driver's.
 */
#ifndef GGROUP_CUDA_NAMES_H
#define GGROUP_CUDA_NAMES_H

#include <stdbool.h>

#include "api.h"

/* Return a name that no handle of the driver has, as those are addresses. With the lock of the tree held. */
CUmemGenericAllocationHandle names_next(void);

/* Return the name for a handle that the driver has just given: of memory that has, or had, one (`again`), or of new
 * memory. 0 without memory for it. */
CUmemGenericAllocationHandle names_give(CUmemGenericAllocationHandle real, bool again);
/* Return the driver's handle of a name. */
CUmemGenericAllocationHandle names_real(CUmemGenericAllocationHandle name);
/* Note that the program releases a name, once. False: that changes nothing here. */
bool names_released(CUmemGenericAllocationHandle name);
/* Undo that, where the driver refused. */
void names_kept(CUmemGenericAllocationHandle name);

#endif
