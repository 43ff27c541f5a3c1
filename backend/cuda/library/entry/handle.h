/* SPDX-License-Identifier: Apache-2.0 */
/* Handles of physical memory that go from the driver to the program, and back. */
#ifndef GGROUP_CUDA_HANDLE_H
#define GGROUP_CUDA_HANDLE_H

#include "binding.h"

/* The name of a handle that the driver has just given (names.h); without memory for it, it is given back. */
CUresult handle_give(CUmemGenericAllocationHandle *handle, bool again);
/* Makes one handle of the driver's stand for an object for good, since it goes where we do not see; `real` is what the driver
 * calls it, or any other handle. What it stands for is held by `binding`, if there is one. */
CUresult handle_fix(CUmemGenericAllocationHandle handle, CUmemGenericAllocationHandle *real, struct binding *binding);

#endif
