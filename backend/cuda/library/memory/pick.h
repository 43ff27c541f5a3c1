/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which chunks go, and which come back: by how often they were used of late. Among those that are equally
 * cold a CLOCK's hand goes around, so that each has its turn. While the program waits for its turn what it
 * did not use in the last one goes first, and then what is last in order.h.
 */
#ifndef GGROUP_CUDA_PICK_H
#define GGROUP_CUDA_PICK_H

#include "chunk.h"

/*
 * For the mover: the coldest on the GPU, the hottest in the host, those in the host in
 * [address, address + bytes). Chunks of about `want` bytes, in the order of their addresses within a region; at most
 * `most` of them. They are busy, so that no thread frees them, until pick_put says otherwise. An
 * object that goes as a whole goes if it has no more than `whole_most`, however little is wanted.
 */
size_t pick_out(struct device *device, size_t want, size_t whole_most, struct pick *picks, size_t most);
/* ... as pick_out will pick them next: the hand stays where it is. */
size_t pick_next(struct device *device, size_t want, struct pick *picks, size_t most);
size_t pick_in(struct device *device, size_t want, struct pick *picks, size_t most);
size_t pick_range(CUdeviceptr address, size_t bytes, struct pick *picks, size_t most);
/* ... those on the GPU there that other processes can, or cannot, map; in `serial`, if that is not 0. */
size_t pick_shareable(CUdeviceptr address, size_t bytes, uint64_t serial, bool can, struct pick *picks,
			     size_t most);
/* ... those that were imported, on a GPU or in the host. */
size_t pick_imported(struct device *device, enum chunk_place place, size_t want, struct pick *picks, size_t most);
/* ... all of them, to be freed by the caller: 0; EBUSY while a thread is at one of them, EOPNOTSUPP where one may be
 * mapped by others, ENOMEM. */
int pick_all(struct device *device, struct pick **picks, size_t *count);
void pick_put(const struct pick *picks, size_t count);

/* With the lock of the tree. Calls `visit` for every chunk of it. */
void pick_each(struct region_tree *tree, void (*visit)(struct pick *pick, void *), void *argument);
/* ... Whether a chunk that is there can be moved. */
bool pick_movable(const struct pick *pick, enum chunk_place from);
/* For qsort: in the order of their addresses. */
int pick_by_address(const void *a, const void *b);

/*
 * Turns uses into heat; false: too few were counted yet for what was used as often as something else to look
 * like it. `must`: turns them all the same, since the program uses nothing that often.
 */
bool pick_look(struct device *device, bool must);
/* Bytes in the host that are so much hotter than as many on the GPU that they should change places; `most`
 * of them. */
size_t pick_misplaced(struct device *device, size_t most);

#endif
