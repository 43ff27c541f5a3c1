/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor maps: what kernels of Hopper and later are passed in the place of a pointer, as a parameter of 128 bytes that
 * only the driver and the GPU can read (CUtensorMap).
 *
 * Which memory each describes is known from the call that encoded it, by its bytes. So many are remembered, and the
 * oldest forgotten: a program may encode one for every launch. A map that a kernel changed, or that lies in memory of
 * the GPU, is not known by its bytes; what it describes is seen as far as the program passes a pointer to that, too.
 */
#ifndef GGROUP_CUDA_TENSOR_H
#define GGROUP_CUDA_TENSOR_H

#include <stdbool.h>
#include <stddef.h>

#include "api.h"

/* Among parameters it is at a multiple of this (cuda.h). */
#define TENSOR_ALIGNMENT 64

extern bool tensor_any;		/* atomically: one was encoded */

/* A map describes memory: `bytes` of it, from the lowest address to the end of the last element; 0: it is not known. */
void tensor_encoded(const CUtensorMap *map, CUdeviceptr address, size_t bytes);
/* Whether a map is in the sizeof(CUtensorMap) bytes at `at`, aligned or not, and what it describes. Lock-free. */
bool tensor_find(const void *at, CUdeviceptr *address, size_t *bytes);

#endif
