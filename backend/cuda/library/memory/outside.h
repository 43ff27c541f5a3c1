/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices that reach memory of the GPU without a call of CUDA: network adapters by nvidia-peermem (ibv_reg_mr),
 * GDRCopy, GPUDirect Storage. The memory that they reach must stay where it is.
 */
#ifndef GGROUP_CUDA_OUTSIDE_H
#define GGROUP_CUDA_OUTSIDE_H

#include <stdbool.h>

/* Return whether the process has such a device open, or was ever seen to; also true where that cannot be seen, as /proc
 * is missing or descriptors are short. */
bool outside_is_open(void);

#endif
