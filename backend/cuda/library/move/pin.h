/* SPDX-License-Identifier: Apache-2.0 */
/* What stays where it is: exported, or reached from outside. */
#ifndef GGROUP_CUDA_PIN_H
#define GGROUP_CUDA_PIN_H

#include "chunk.h"

/* Keeps what holds [address, address + bytes) where it is from now on, on the GPU, as something outside of the program
 * reaches it: a network adapter, another process. That may do so after it is freed, as long as the driver has it: no
 * other allocation gets it. */
CUresult pin_range(CUdeviceptr address, size_t bytes);
/* The same for what the program has made itself (object.h) and mapped there. CUDA_SUCCESS where that is nothing. */
CUresult pin_objects(CUdeviceptr address, size_t bytes);
/* One that is claimed stays, with one handle of the driver's behind it. */
CUresult pin_whole(struct region *region);

#endif
