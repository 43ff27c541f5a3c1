/* SPDX-License-Identifier: Apache-2.0 */
/* The pieces of managed memory (unified.h) on their way between GPU and host. */
#ifndef GGROUP_CUDA_PIECE_H
#define GGROUP_CUDA_PIECE_H

#include "unified.h"

/* Let a piece that is in the host be on the GPU, if the daemon has room for it. By a thread that has the allocation to
 * itself, within driver_enter. */
bool piece_come(struct unified *unified, size_t piece);

/* By the listening thread. */

/* Have at least `bytes` of a device be in the host, or all that can be, in pieces; returns the bytes that went, which
 * are credit (pool_credit). The microseconds that it took are added to `usec`. */
uint64_t piece_out(struct device *device, uint64_t bytes, uint64_t *usec);
/* Let up to `bytes` be on the GPU again, asking the daemon for room (daemon_move_in) until it refuses; returns the
 * bytes that came, and adds the time as above. */
uint64_t piece_in(struct device *device, uint64_t bytes, uint64_t *usec);

#endif
