/* SPDX-License-Identifier: Apache-2.0 */
/* The pools of a generator. */
#ifndef UNIT_POOLS_H
#define UNIT_POOLS_H

#include "model.h"

/* Return the default pool of the GPU. */
CUmemoryPool pools_default(void);
/* Free an allocation from a pool, in a stream or at once. */
void pools_free(struct plain *plain);

#endif
