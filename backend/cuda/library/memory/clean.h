/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies in the host of chunks that have come from there: a chunk that still equals its copy need not be copied to go
 * again. They are pinned, as far as the daemon grants that, are not swap, and are the first to go where the host is short.
 * Which chunk equals its copy is found out by their marks (hash.h).
 */
#ifndef GGROUP_CUDA_CLEAN_H
#define GGROUP_CUDA_CLEAN_H

#include "chunk.h"

/* Whether a copy may be kept of a chunk that the caller has, which comes: where there is a grant that has room for it, and not for
 * one that has changed each time of late. */
bool clean_may_keep(const struct pick *pick);
/* Whether it is worth to mark a chunk that the caller has before it goes. */
bool clean_wants_mark(const struct pick *pick);
/* Keeps the copy of a chunk that the caller has, and that is on the GPU now. */
void clean_keep(const struct pick *pick, struct spare copy, struct mark mark);
/* The copy of a chunk that the caller has, which is about to go: it has none any more; false: it had none. */
bool clean_take(const struct pick *pick, struct spare *copy, struct mark *mark);
/* What was found out of one that had a copy. */
void clean_found(const struct pick *pick, bool equal);

/* Bytes on the GPU that were found, in the gap between two turns that the program is in, to equal their copies: to go they need
 * not be copied. 0 in a turn, where they may be written. For the thread that marks (mover_mark). */
uint64_t clean_unwritten(struct device *device);

/* Takes a copy away from some chunk that no thread has; false: there is none of that class. */
bool clean_steal(struct device *device, enum chunk_class class, struct spare *copy);
/* Frees all copies, but of chunks that a thread has. A context as for pool.h. */
void clean_drop_all(struct device *device);
/* Frees the copy of a chunk that the caller has, if it has one. A context as for pool.h. */
void clean_forget(struct region *region, size_t index);

#endif
