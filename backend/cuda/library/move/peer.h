/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that another GPU of the process may use as well (cuCtxEnablePeerAccess, cuMemPoolSetAccess). It moves as all
 * does: the gate is that of the process, what runs on the other GPU is waited for as well (view_users), and both have
 * access again wherever it is mapped (tree_access). Memory that other processes have mapped stays (pin.h).
 */
#ifndef GGROUP_CUDA_PEER_H
#define GGROUP_CUDA_PEER_H

#include "device.h"

/* From now on everything on `device` can be used by `peer` too. Waits until nothing of it is on its way. */
CUresult peer_give(struct device *device, CUdevice peer);

#endif
