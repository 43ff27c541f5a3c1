/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which stream a call means, and which are being captured.
 */
#ifndef GGROUP_CUDA_STREAM_H
#define GGROUP_CUDA_STREAM_H

#include "device.h"

/* A stream, told from all others of the process. */
struct stream_key {
	CUstream stream;	/* its handle; CU_STREAM_LEGACY, CU_STREAM_PER_THREAD */
	CUcontext context;	/* of those two; NULL for one with a handle of its own */
	uint64_t thread;	/* of CU_STREAM_PER_THREAD: a number that no other thread has had */
};

/* What `stream` means in the calling thread; `per_thread`: an entry point whose stream 0
 * is the thread's own. */
struct stream_key stream_key(CUstream stream, bool per_thread);
static inline bool stream_is_own(CUstream stream, bool per_thread)
{
	return stream == CU_STREAM_PER_THREAD || (!stream && per_thread);
}
static inline bool stream_same(const struct stream_key *a, const struct stream_key *b)
{
	return a->stream == b->stream && a->context == b->context && a->thread == b->thread;
}

extern int stream_captures; /* how many are active; atomically */
static inline bool stream_capturing_any(void)
{
	return __atomic_load_n(&stream_captures, __ATOMIC_ACQUIRE) != 0;
}
/* Whether work for this stream is captured, as the driver says. */
bool stream_captured(CUstream stream, bool per_thread);
/* Whether it is run instead. Costs next to nothing while nothing is captured. */
bool stream_runs(CUstream stream, bool per_thread);

/* A capture is about to begin there: said before, so that nothing of ours gets into it. False without memory. */
bool stream_capture_begins(CUstream stream, bool per_thread);
/* The capture there is over, or there was none; and all those in a context that is gone are. */
void stream_capture_over(const struct stream_key *key);
void stream_context_gone(CUcontext context);
#endif
