/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of what places an allocation: the library or the driver. */
#ifndef GGROUP_CUDA_MEMORY_H
#define GGROUP_CUDA_MEMORY_H

#include "device.h"

/* Return whether the library, and not the driver, places allocations on `device`; false for NULL. */
bool memory_elastic(const struct device *device);

#endif
