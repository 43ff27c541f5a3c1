/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the program calls the handles of the driver that it has: by their values, but where an object has such a value
 * for its name (object.h). Then it is given another, which every entry point that takes a handle leads back to the driver's.
 */
#ifndef GGROUP_CUDA_NAMES_H
#define GGROUP_CUDA_NAMES_H

#include <stdbool.h>

#include "api.h"

/* A name that no handle of the driver has: those are addresses. With the lock of the tree. */
CUmemGenericAllocationHandle names_next(void);

/* The driver has given the program a handle, of memory that has, or had, one (`again`), or of other memory: what to call it.
 * 0: without memory. */
CUmemGenericAllocationHandle names_give(CUmemGenericAllocationHandle real, bool again);
/* What the driver calls it. */
CUmemGenericAllocationHandle names_real(CUmemGenericAllocationHandle name);
/* The program releases it, once. False: that changes nothing here. */
bool names_released(CUmemGenericAllocationHandle name);
/* ... or has not, after all. */
void names_kept(CUmemGenericAllocationHandle name);

#endif
