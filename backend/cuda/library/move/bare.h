/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bare chunks: in the host, and mapped nowhere but at their windows. To map 64 MiB of the host takes the driver's
 * lock for 1.0 ms, and to unmap them 0.4 ms. A program that waits for its turn, with nothing running, uses no
 * memory; so what goes out then is left bare, and what comes back before its gate opens costs neither. The rest is
 * covered, that is mapped, before the gate opens, for whatever reason (turn.h), and before work of the program
 * passes without a turn there, or the driver is asked about an address (turn_look).
 *
 * Not bare: objects, which the program maps itself; what another GPU may use; and what goes out while something
 * runs.
 */
#ifndef GGROUP_CUDA_BARE_H
#define GGROUP_CUDA_BARE_H

#include "chunk.h"

/* Whether a part of a region that goes out now stays bare. By the holder of the mover's lock. */
bool bare_may(const struct region *region);
/* Covers what is bare on all GPUs, where a checkpoint is about to be made; false: some still is. Waits for what
 * moves. */
bool bare_end(void);

#endif
