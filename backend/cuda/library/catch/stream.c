// SPDX-License-Identifier: Apache-2.0
/*
 * Streams that are captured, and streams that are destroyed.
 *
 * The captures are kept as a list, not as a number: one whose stream or context is destroyed is
 * over, and must not keep the gate open for ever.
 */

#include "stream.h"

#include <stdlib.h>

#include "counters.h"
#include "driver.h"
#include "gate.h"

struct capture {
	struct capture *next;
	struct stream_key key;
	CUcontext context;
};

int stream_captures;
static struct capture *captures;	/* under `lock` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t this_thread(void)
{
	static uint64_t last;	/* atomically */
	static __thread uint64_t number;

	if (!number)
		number = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
	return number;
}

struct stream_key stream_key(CUstream stream, bool per_thread)
{
	struct stream_key key = { .stream = stream };

	if (stream_is_own(stream, per_thread)) {
		key.stream = CU_STREAM_PER_THREAD;
		key.thread = this_thread();
	} else if (!stream || stream == CU_STREAM_LEGACY) {
		key.stream = CU_STREAM_LEGACY;
	} else {
		return key;
	}
	if (real.cuCtxGetCurrent(&key.context))
		key.context = NULL;
	return key;
}

bool stream_captured(CUstream stream, bool per_thread)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result;

	if (per_thread && real.cuStreamIsCapturing_ptsz)
		CALL_REAL(result, cuStreamIsCapturing_ptsz, (stream, &status));
	else
		CALL_REAL(result, cuStreamIsCapturing, (stream, &status));
	/* The legacy stream, while one that waits for it is captured: what is launched there now
	 * will fail, and for the rest the driver is to say what it thinks of it. */
	return result || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool stream_runs(CUstream stream, bool per_thread)
{
	return !stream_capturing_any() || !stream_captured(stream, per_thread);
}

/* Before the capture begins, so that nothing of ours gets into it. */
static struct capture *add(CUstream stream, bool per_thread)
{
	struct capture *capture = calloc(1, sizeof(*capture));

	if (!capture)
		return NULL;
	capture->key = stream_key(stream, per_thread);
	if (capture->key.context)
		capture->context = capture->key.context;
	else if (real.cuStreamGetCtx(stream, &capture->context))
		capture->context = NULL;
	pthread_mutex_lock(&lock);
	capture->next = captures;
	captures = capture;
	__atomic_add_fetch(&stream_captures, 1, __ATOMIC_ACQ_REL);
	pthread_mutex_unlock(&lock);
	gate_capture(1);
	return capture;
}

static bool matches(const struct capture *capture, const struct stream_key *key, CUcontext context)
{
	return key ? stream_same(&capture->key, key) : capture->context == context;
}

/* Takes those of one stream, or of one context, off the list. */
static void drop(const struct stream_key *key, CUcontext context)
{
	int dropped = 0;

	pthread_mutex_lock(&lock);
	for (struct capture **at = &captures; *at;) {
		struct capture *capture = *at;

		if (!matches(capture, key, context)) {
			at = &capture->next;
			continue;
		}
		*at = capture->next;
		free(capture);
		dropped++;
	}
	__atomic_sub_fetch(&stream_captures, dropped, __ATOMIC_ACQ_REL);
	pthread_mutex_unlock(&lock);
	if (dropped)
		gate_capture(-dropped);
}

static void over(CUstream stream, bool per_thread)
{
	struct stream_key key = stream_key(stream, per_thread);

	drop(&key, NULL);
	counters_capture_ended(stream, per_thread);
}

void stream_context_gone(CUcontext context)
{
	drop(NULL, context);
}

void stream_forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	captures = NULL;
	stream_captures = 0;
}

/* The gate is entered, so that it is not closed between the beginning and our knowing of it. */
static bool begin(CUstream stream, bool per_thread)
{
	struct capture *capture;

	state_current_device();
	gate_enter();
	state_enter();
	capture = add(stream, per_thread);
	if (capture)
		counters_capture_begins(stream, per_thread);
	return capture != NULL;
}

static CUresult begun(CUstream stream, bool per_thread, CUresult result)
{
	/* A second beginning in a stream that is captured fails, and the first goes on. */
	if (result && !stream_captured(stream, per_thread))
		over(stream, per_thread);
	state_leave();
	gate_leave();
	return result;
}

#define BEGIN(name, parameters, arguments, per_thread)			\
	WRAPPER name parameters						\
	{								\
		PASS_INSIDE(name, arguments);				\
		if (!begin(hStream, per_thread)) {			\
			state_leave();					\
			gate_leave();					\
			return CUDA_ERROR_OUT_OF_MEMORY;		\
		}							\
		return begun(hStream, per_thread, real.name arguments);	\
	}

BEGIN(cuStreamBeginCapture, (CUstream hStream), (hStream), false)
BEGIN(cuStreamBeginCapture_ptsz, (CUstream hStream), (hStream), true)
BEGIN(cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode), false)
BEGIN(cuStreamBeginCapture_v2_ptsz, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode),
      true)

#define TO_GRAPH								\
	(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,	\
	 const CUgraphEdgeData *dependencyData, size_t numDependencies,		\
	 CUstreamCaptureMode mode)
#define TO_GRAPH_ARGUMENTS (hStream, hGraph, dependencies, dependencyData, numDependencies, mode)
BEGIN(cuStreamBeginCaptureToGraph, TO_GRAPH, TO_GRAPH_ARGUMENTS, false)
BEGIN(cuStreamBeginCaptureToGraph_ptsz, TO_GRAPH, TO_GRAPH_ARGUMENTS, true)

/* Whatever it answers, an invalidated capture is over too; the wrong thread's call ends nothing. */
static CUresult ended(CUstream stream, bool per_thread, CUresult result)
{
	if (!stream_captured(stream, per_thread))
		over(stream, per_thread);
	state_leave();
	return result;
}

#define END(name, per_thread)							\
	WRAPPER name(CUstream hStream, CUgraph *phGraph)			\
	{									\
		PASS_INSIDE(name, (hStream, phGraph));				\
		state_enter();							\
		return ended(hStream, per_thread, real.name(hStream, phGraph));	\
	}

END(cuStreamEndCapture, false)
END(cuStreamEndCapture_ptsz, true)

/* Inside the gate, so that the mover's look at what runs, and the end of a stream, do not meet. */
#define DESTROY(name)							\
	WRAPPER name(CUstream hStream)					\
	{								\
		struct stream_key key = { .stream = hStream };		\
		CUresult result;					\
									\
		PASS_INSIDE(name, (hStream));				\
		gate_enter();						\
		state_enter();						\
		/* 0, 1 and 2 are no streams that can be destroyed. */	\
		if ((uintptr_t)hStream > 2) {				\
			counters_stream_gone(hStream);			\
			drop(&key, NULL);				\
		}							\
		result = real.name(hStream);				\
		state_leave();						\
		gate_leave();						\
		return result;						\
	}

DESTROY(cuStreamDestroy)
DESTROY(cuStreamDestroy_v2)
