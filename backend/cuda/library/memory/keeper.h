/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that allocates host chunks ahead. */
#ifndef GGROUP_CUDA_KEEPER_H
#define GGROUP_CUDA_KEEPER_H

#include "chunk.h"

/* Has host chunks allocated in the background, because the program has grown, or because `soon` bytes may have to move
 * out before long. `resident`: bytes of the regions in each class. Makes no call of the driver. */
void keeper_expect(struct device *device, const uint64_t resident[CLASSES], uint64_t soon);

/* Sets how many bytes of the host may be used from now on; UINT64_MAX: as much as the library takes by itself. Beyond
 * that, host memory is allocated only for chunks that have to go there, and none of it is kept. */
void keeper_grant(struct device *device, uint64_t bytes);

#endif
