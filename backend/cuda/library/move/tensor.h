/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor maps: on Hopper and later, kernels may get one in place of a pointer, as a parameter of 128 bytes that only
 * the driver and the GPU can read (CUtensorMap).
 *
 * A map is recognised by its bytes, and the memory that it describes is known from the call that encoded it. A fixed
 * number is remembered, and the oldest forgotten: a program may encode one for every launch. A map that a kernel has
 * changed, or that lies in GPU memory, is not recognised; its memory is seen only if the program passes a pointer to
 * that as well.
 */
#ifndef GGROUP_CUDA_TENSOR_H
#define GGROUP_CUDA_TENSOR_H

#include <stdbool.h>
#include <stddef.h>

#include "api.h"

/* Alignment of a map among parameters, in bytes (cuda.h). */
#define TENSOR_ALIGNMENT 64

extern bool tensor_any;		/* atomically: a map has been encoded */

/* Remembers a map and the memory that it describes: `bytes` from the lowest address to the end of the last element; 0:
 * unknown. */
void tensor_encoded(const CUtensorMap *map, CUdeviceptr address, size_t bytes);
/* Whether the sizeof(CUtensorMap) bytes at `at`, aligned or not, are a known map; then returns the memory it describes.
 * Lock-free. */
bool tensor_find(const void *at, CUdeviceptr *address, size_t *bytes);

#endif
