/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The stream that a call means, and the streams that are being captured.
 */
#ifndef GGROUP_CUDA_STREAM_H
#define GGROUP_CUDA_STREAM_H

#include "device.h"

/* The identity of a stream, distinct from all other streams of the process. */
struct stream_key {
	CUstream stream;	/* its handle; CU_STREAM_LEGACY, CU_STREAM_PER_THREAD */
	CUcontext context;	/* of those two; NULL with a handle of its own */
	uint64_t thread;	/* of CU_STREAM_PER_THREAD: a number that no other thread ever had */
};

/* Return the identity of `stream` in the calling thread; `per_thread`: for an entry point whose stream 0 is the
 * thread's own. */
struct stream_key stream_key(CUstream stream, bool per_thread);
/* Return the same, where `current` is the calling thread's context, without asking the driver for it. */
struct stream_key stream_key_in(CUcontext current, CUstream stream, bool per_thread);
static inline bool stream_is_own(CUstream stream, bool per_thread)
{
	return stream == CU_STREAM_PER_THREAD || (!stream && per_thread);
}
static inline bool stream_same(const struct stream_key *a, const struct stream_key *b)
{
	return a->stream == b->stream && a->context == b->context && a->thread == b->thread;
}

/* Return the GPU of the stream that a call means; -1: unknown. Its context need not be the current one. */
CUdevice stream_device(CUstream stream, bool per_thread);

extern int stream_captures; /* number of active captures; atomically */
static inline bool stream_capturing_any(void)
{
	return __atomic_load_n(&stream_captures, __ATOMIC_ACQUIRE) != 0;
}
/* Return whether work for this stream is captured, by the driver's word. */
bool stream_captured(CUstream stream, bool per_thread);
/* Return whether it runs instead. Costs next to nothing while nothing is captured. */
bool stream_runs(CUstream stream, bool per_thread);

/* Note that a capture is about to begin: before it does, so that nothing of the library gets into it. False without
 * memory. */
bool stream_capture_begins(CUstream stream, bool per_thread);
/* Note that the capture there is over, or did not begin; or that all captures in a context are, with the context. */
void stream_capture_over(const struct stream_key *key);
void stream_context_gone(CUcontext context);
#endif
