/* SPDX-License-Identifier: Apache-2.0 */
/* Pinning: memory that stays where it is, as it is exported, or reached from outside. */
#ifndef GGROUP_CUDA_PIN_H
#define GGROUP_CUDA_PIN_H

#include "chunk.h"

/* Keep the memory of [address, address + bytes) on the GPU where it is from now on, as something outside of the program
 * reaches it: a network adapter, another process. That may do so even after it is freed, as long as the driver has it,
 * so no other allocation gets it. */
CUresult pin_range(CUdeviceptr address, size_t bytes);
/* Do the same for objects mapped there (object.h). CUDA_SUCCESS where there are none. */
CUresult pin_objects(CUdeviceptr address, size_t bytes);
/* Pin a claimed object, behind one handle of the driver's. */
CUresult pin_whole(struct region *region);

#endif
