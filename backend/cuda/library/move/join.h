/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An object that has moved is put behind one handle of the driver's again, on the GPU: what is exported, bound to a multicast
 * object or mapped to a sparse array goes by that.
 */
#ifndef GGROUP_CUDA_JOIN_H
#define GGROUP_CUDA_JOIN_H

#include "chunk.h"

/* By a thread of the program that has claimed it, outside the gate. It takes as much memory of the GPU again while it
 * changes, which is charged: CUDA_ERROR_OUT_OF_MEMORY. Waits in the daemon, and for seconds until nothing runs and the copies
 * have come to their end: CUDA_ERROR_NOT_READY, and a copy that has not keeps its claim until it has. */
CUresult join_object(struct region *region);

#endif
