/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Putting an object that has moved behind one handle of the driver's again, on the GPU: exporting it, binding it to a
 * multicast object or mapping it to a sparse array needs that.
 */
#ifndef GGROUP_CUDA_JOIN_H
#define GGROUP_CUDA_JOIN_H

#include "chunk.h"

/* Join an object that a thread of the program has claimed, outside the gate. Takes the same amount of memory on the GPU
 * once more meanwhile, charged: CUDA_ERROR_OUT_OF_MEMORY. Waits for the daemon, and for seconds until nothing runs and
 * the copies have ended: CUDA_ERROR_NOT_READY, and a copy that has not keeps its claim until it has. */
CUresult join_object(struct region *region);

#endif
