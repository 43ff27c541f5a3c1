/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices that reach memory of the GPU without a call of CUDA: network adapters by nvidia-peermem (ibv_reg_mr), GDRCopy,
 * GPUDirect Storage. What they reach must stay where it is.
 */
#ifndef GGROUP_CUDA_OUTSIDE_H
#define GGROUP_CUDA_OUTSIDE_H

#include <stdbool.h>

/* Whether the process has one open, or ever was seen to have; also where that cannot be seen: /proc is not there, or
 * descriptors are short. */
bool outside_is_open(void);

#endif
