/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that makes chunks of the host ahead. */
#ifndef GGROUP_CUDA_KEEPER_H
#define GGROUP_CUDA_KEEPER_H

#include "chunk.h"

/* The program has grown, or `soon` bytes may be moved out before long: chunks of the host are made
 * in the background. `resident` is what regions have in each class. No call of the driver. */
void keeper_expect(struct device *device, const uint64_t resident[CLASSES], uint64_t soon);

struct pool;

/* Has what was wanted last be made ahead, but for no more than `most` bytes, what is in use included. With the lock; true: that
 * is more than before. */
bool keeper_set_goals(struct pool *pool, uint64_t most);

#endif
