/* SPDX-License-Identifier: Apache-2.0 */
/* What stays where it is: exported, or used by another GPU. */
#ifndef GGROUP_CUDA_PIN_H
#define GGROUP_CUDA_PIN_H

#include "device.h"

/* Keeps what holds [address, address + bytes) where it is from now on, on the GPU. */
CUresult pin_range(CUdeviceptr address, size_t bytes);
/* From now on everything on `device` can be used by `peer` too, and stays on the GPU. */
CUresult pin_peer(struct device *device, CUdevice peer);

#endif
