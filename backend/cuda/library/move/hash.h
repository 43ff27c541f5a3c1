/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks of chunks on the GPU, made by a kernel of the library (hash.cu): chunks with the same mark are equal. The
 * kernel runs in a context of the program, while nothing of the program itself runs.
 */
#ifndef GGROUP_CUDA_HASH_H
#define GGROUP_CUDA_HASH_H

#include "chunk.h"

/* Whether marks can be made: loads the kernel into the borrowed context if needed. With the mover's lock, and nothing
 * running: loading may wait for that. */
bool hash_ready(struct device *device);
/*
 * Makes the marks of chunks in a stream of the library that has no copies, and waits for them. On an error no mark is
 * made, and none will be for some time, unless it is CUDA_ERROR_NOT_READY. `unsure`: the chunks may still be being
 * read.
 */
struct hash_order {
	CUstream stream;
	uint64_t wait_us;
	size_t count;			/* number of chunks */
	const CUdeviceptr *at;		/* address at which each can be read */
	const size_t *bytes;		/* of each chunk; at most those of a run in all */
};
CUresult hash_chunks(struct device *device, const struct hash_order *order, struct mark *marks, bool *unsure);

#endif
