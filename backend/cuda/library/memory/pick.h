/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which chunks go to the host, and which come back, by how often they were used lately. Among equally cold chunks the
 * hand of a CLOCK goes round, so that each has its turn. While the program waits for its turn, chunks that it did not
 * use in the last one go first, then the last ones in the order of order.h.
 */
#ifndef GGROUP_CUDA_PICK_H
#define GGROUP_CUDA_PICK_H

#include "chunk.h"

/*
 * For the mover: the coldest chunks on the GPU, the hottest in the host, or those in the host in [address, address +
 * bytes). Picks chunks of about `want` bytes, at most `most` of them, sorted by address within a region. They are
 * marked busy, so that no thread frees them, until pick_put. An object that goes as a whole goes if it has at most
 * `whole_most` bytes, however little is wanted.
 */
size_t pick_out(struct device *device, size_t want, size_t whole_most, struct pick *picks, size_t most);
/* Picks the chunks that pick_out will pick next; the hand does not move. */
size_t pick_next(struct device *device, size_t want, struct pick *picks, size_t most);
size_t pick_in(struct device *device, size_t want, struct pick *picks, size_t most);
size_t pick_range(CUdeviceptr address, size_t bytes, struct pick *picks, size_t most);
/* Picks chunks on the GPU that other processes can, or cannot, map; with `serial` not 0, only of that region. */
size_t pick_shareable(CUdeviceptr address, size_t bytes, uint64_t serial, bool can, struct pick *picks,
			     size_t most);
/* Picks imported chunks, on a GPU or in the host. */
size_t pick_imported(struct device *device, enum chunk_place place, size_t want, struct pick *picks, size_t most);
/* Picks all chunks, for the caller to free. Returns 0; EBUSY while a thread uses one of them; EOPNOTSUPP if one may be
 * mapped by other processes; ENOMEM. */
int pick_all(struct device *device, struct pick **picks, size_t *count);
void pick_put(const struct pick *picks, size_t count);

/* With the lock of the tree, as pick_movable. Calls `visit` for each of its chunks. */
void pick_each(struct region_tree *tree, void (*visit)(struct pick *pick, void *), void *argument);
/* Whether a chunk in `from` can be moved. With the lock of the tree. */
bool pick_movable(const struct pick *pick, enum chunk_place from);
/* For qsort: orders by address. */
int pick_by_address(const void *a, const void *b);

/*
 * Turns uses into heat; false: too few were counted so far, and chunks used equally often could look different. `must`:
 * turns them into heat all the same, since the program uses nothing that often.
 */
bool pick_look(struct device *device, bool must);
/* Bytes in the host so much hotter than as many bytes on the GPU that the two should change places; at most `most`. */
size_t pick_misplaced(struct device *device, size_t most);

#endif
