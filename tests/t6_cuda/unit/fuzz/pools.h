/* SPDX-License-Identifier: Apache-2.0 */
/* The pools of a generator. */
#ifndef UNIT_POOLS_H
#define UNIT_POOLS_H

#include "model.h"

/* The default one of the GPU. */
CUmemoryPool pools_default(void);
/* Frees what came from a pool, in a stream or at once. */
void pools_free(struct plain *plain);

#endif
