/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The working set of a program on a GPU: the chunks that it used in its last turn, in the order of their first use. If
 * turns are shorter than a second, it covers the turns of the last second: a program may repeat its work, and one round
 * may take longer than a turn. The chunk used longest ago is then needed next, and comes first.
 *
 * It is learnt as heat is (pages.h), so only while that is wanted. Chunks come back in this order, and go in the
 * reverse order.
 */
#ifndef GGROUP_CUDA_ORDER_H
#define GGROUP_CUDA_ORDER_H

#include "chunk.h"

/* A turn is over, in which the program ran for `usec`. The working set becomes what was used since the last call, and
 * in earlier turns as far as they count. If nothing was used, it stays. */
void order_learn(struct device *device, uint64_t usec);
/* Uses count from now on; earlier ones do not. */
void order_begin(struct device *device);
/* Bytes of the working set, and how many of them are on the GPU. */
void order_sums(struct device *device, uint64_t *used, uint64_t *resident);
/* How well the previous working set predicted the last turn: bytes used that were not in it, and bytes in it that were
 * not used. Both are 0 for the first turn. */
void order_misses(struct device *device, uint64_t *missed, uint64_t *over);

/* For the mover, as in pick.h, but in this order: the first chunks in the host, at most `want` bytes. */
size_t order_next(struct device *device, size_t want, struct pick *picks, size_t most);
/* The last chunks on the GPU, at least `want` bytes if there are as many; excludes objects that go as a whole and have
 * more than `whole_most` bytes. With the lock of the tree. */
size_t order_last(struct region_tree *tree, size_t want, size_t whole_most, struct pick *picks, size_t most);

#endif
