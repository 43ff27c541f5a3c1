/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies that stay in the host after their chunk has come back to the GPU: a chunk that still equals its copy need not
 * be copied to go again. Copies are pinned, as far as the daemon grants that; they are no swap, and are the first to go
 * when the host is short. Marks show which chunks equal their copies (hash.h).
 */
#ifndef GGROUP_CUDA_CLEAN_H
#define GGROUP_CUDA_CLEAN_H

#include "chunk.h"

/* Whether to keep a copy of a chunk that is coming in, which the caller has: if the grant has room for it, and the
 * chunk has not changed each time lately. */
bool clean_may_keep(const struct pick *pick);
/* Whether to mark a chunk, which the caller has, before it goes. */
bool clean_wants_mark(const struct pick *pick);
/* Keeps `copy` for a chunk that the caller has, and that is on the GPU now. */
void clean_keep(const struct pick *pick, struct spare copy, struct mark mark);
/* Takes the copy of a chunk that the caller has, and that is about to go; false: it has none. */
bool clean_take(const struct pick *pick, struct spare *copy, struct mark *mark);
/* Records whether a chunk was found equal to its copy. */
void clean_found(const struct pick *pick, bool equal);

/* Bytes on the GPU that were found to equal their copies in the current gap between two turns: they can go without
 * being copied. 0 in a turn, in which they may be written. For the thread that marks (mover_mark). */
uint64_t clean_unwritten(struct device *device);

/* Takes the copy of some chunk that no thread has; false: there is none of that class. */
bool clean_steal(struct device *device, enum chunk_class class, struct spare *copy);
/* Frees all copies, except of chunks that a thread has. Needs a context, as for pool.h. */
void clean_drop_all(struct device *device);
/* Frees the copy of a chunk that the caller has, if any. Needs a context, as for pool.h. */
void clean_forget(struct region *region, size_t index);

#endif
