/* SPDX-License-Identifier: Apache-2.0 */
/* Handles of physical memory on their way between the driver and the program. */
#ifndef GGROUP_CUDA_HANDLE_H
#define GGROUP_CUDA_HANDLE_H

#include "binding.h"

/* Replace a handle that the driver has just given by its name (names.h); without memory for that, release it. */
CUresult handle_give(CUmemGenericAllocationHandle *handle, bool again);
/* Have one handle of the driver's stand for an object for good, since it leaves the library's sight. `real` is set to
 * the driver's handle, also for a handle that is no object's. `binding`, if there is one, holds the memory. */
CUresult handle_fix(CUmemGenericAllocationHandle handle, CUmemGenericAllocationHandle *real, struct binding *binding);

#endif
