/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation: who places it. */
#ifndef GGROUP_CUDA_MEMORY_H
#define GGROUP_CUDA_MEMORY_H

#include "device.h"

/* Whether allocations on it are ours to place, and not the driver's. NULL: no device of ours. */
bool memory_elastic(const struct device *device);

#endif
