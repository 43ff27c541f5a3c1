/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks of what is on the GPU, by a kernel of ours (hash.cu): two chunks with the same mark are equal. It runs in a context
 * of the program, while nothing of the program's own runs.
 */
#ifndef GGROUP_CUDA_HASH_H
#define GGROUP_CUDA_HASH_H

#include "chunk.h"

/* Whether marks can be made: the kernel is in the context that is borrowed. With the mover's lock, and nothing running: what
 * loads the kernel may wait for that. */
bool hash_ready(struct device *device);
/*
 * Makes marks of chunks in a stream of ours, which no copies are in, and waits for that. An error: of none, and for some
 * time none are made, unless it is CUDA_ERROR_NOT_READY; `unsure`: and they may still be read.
 */
struct hash_order {
	CUstream stream;
	uint64_t wait_us;
	size_t count;			/* of chunks */
	const CUdeviceptr *at;		/* where each can be read */
	const size_t *bytes;		/* of each; all of them no more than a run has */
};
CUresult hash_chunks(struct device *device, const struct hash_order *order, struct mark *marks, bool *unsure);

#endif
