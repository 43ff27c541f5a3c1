/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The working set of a program on a GPU: the chunks that it used in its last turn, in the order of their first use. Of
 * turns of less than a second it is what those of the last second used: a program may do the same all over again, and one
 * round of it take longer than a turn. What was used longest ago is then what comes next, and first in the order.
 *
 * It is learnt as heat is (pages.h), so only while that is wanted. What the next turn needs comes in that order, and what
 * has to go before it goes in the reverse.
 */
#ifndef GGROUP_CUDA_ORDER_H
#define GGROUP_CUDA_ORDER_H

#include "chunk.h"

/* A turn is over, in which the program ran for `usec`: the working set is what was used since the last time, and in the
 * turns before as far as they count. Where nothing was used, it stays. */
void order_learn(struct device *device, uint64_t usec);
/* From now on what is used counts; what was used before does not. */
void order_begin(struct device *device);
/* Bytes of the working set, and of those the ones on the GPU. */
void order_sums(struct device *device, uint64_t *used, uint64_t *resident);
/* How well the working set before told of the last turn: bytes that this used and were not in it, and bytes that were in it
 * and were not used. Of the first turn nothing was told. */
void order_misses(struct device *device, uint64_t *missed, uint64_t *over);

/* For the mover, as in pick.h, but in this order: what is first in it of what is in the host, `want` bytes at most. */
size_t order_next(struct device *device, size_t want, struct pick *picks, size_t most);
/* ... with the lock of the tree: what is last in order on the GPU, `want` bytes at least, where there are as many; but no
 * object that goes as a whole and has more than `whole_most`. */
size_t order_last(struct region_tree *tree, size_t want, size_t whole_most, struct pick *picks, size_t most);

#endif
