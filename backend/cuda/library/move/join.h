/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An object that has moved is put behind one handle of the driver's again, on the GPU: what is exported, bound to a multicast
 * object or mapped to a sparse array goes by that.
 */
#ifndef GGROUP_CUDA_JOIN_H
#define GGROUP_CUDA_JOIN_H

#include "chunk.h"

/* By a thread of the program that has claimed it, outside the gate. It takes as much memory of the GPU again while it
 * changes. Waits in the daemon. */
CUresult join_object(struct region *region);

#endif
