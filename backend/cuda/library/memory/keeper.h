/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that makes chunks of the host ahead. */
#ifndef GGROUP_CUDA_KEEPER_H
#define GGROUP_CUDA_KEEPER_H

#include "chunk.h"

/* The program has grown, or `soon` bytes may be moved out before long: chunks of the host are made
 * in the background. `resident` is what regions have in each class. No call of the driver. */
void keeper_expect(struct device *device, const uint64_t resident[CLASSES], uint64_t soon);

/* What may be had of the host from now on, bytes; UINT64_MAX: as much as the library takes by itself. More than that is made for
 * what has to go there, and none of it is kept. */
void keeper_grant(struct device *device, uint64_t bytes);

#endif
