// SPDX-License-Identifier: Apache-2.0
/* Stream capture: enqueued work becomes nodes of a graph, in the order in which it was enqueued. */

#include "internal.h"

static struct capture *captures; /* under fake_lock; active ones, and old ones, whose events may still be queried */
static uint64_t captures_begun;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

bool fake_capturing(struct fake_stream *stream)
{
	bool capturing;

	pthread_mutex_lock(&fake_lock);
	capturing = stream->capture;
	pthread_mutex_unlock(&fake_lock);
	return capturing;
}

CUresult fake_unsafe(void)
{
	CUresult result = CUDA_SUCCESS;

	if (!fake_initialised())
		return CUDA_ERROR_NOT_INITIALIZED;
	if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_SUCCESS;
	pthread_mutex_lock(&fake_lock);
	for (struct capture *capture = captures; capture; capture = capture->next) {
		bool ours = pthread_equal(capture->thread, pthread_self());

		if (!capture->active || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
			continue;
		if (ours || (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
			     capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
			capture->invalid = true;
			result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	}
	pthread_mutex_unlock(&fake_lock);
	return result;
}

/* The legacy stream waits for blocking streams, so it cannot be used while one of them is captured. */
struct capture *fake_in_the_way(struct fake_stream *stream)
{
	if (stream != stream->context->legacy)
		return NULL;
	for (struct fake_stream *other = stream->context->streams; other; other = other->next)
		if (other->blocking && other->capture)
			return other->capture;
	return NULL;
}

CUresult fake_enqueue_job(struct fake_stream *stream, CUgraphNodeType type, struct job *job,
			  const CUDA_KERNEL_NODE_PARAMS *kernel)
{
	CUresult result = CUDA_SUCCESS;
	struct capture *conflict;

	pthread_mutex_lock(&fake_lock);
	conflict = fake_in_the_way(stream);
	if (conflict) {
		conflict->invalid = true;
		result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	} else if (!stream->capture) {
		fake_queue(stream, job);
	} else if (stream->capture->invalid) {
		result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	} else {
		CUgraphNode node = fake_graph_add(stream->capture->graph, type, job);

		if (kernel)
			fake_graph_node_kernel(node, kernel);
	}
	pthread_mutex_unlock(&fake_lock);
	return result;
}

CUresult fake_enqueue(struct fake_stream *stream, CUgraphNodeType type, void (*work)(void *), void *argument,
		      void (*done)(void *))
{
	struct job *job = fake_job(work, argument, done);
	CUresult result = fake_enqueue_job(stream, type, job, NULL);

	fake_job_put(job);
	return result;
}

static CUresult begin(struct fake_stream *stream, CUgraph graph, CUstreamCaptureMode mode)
{
	struct capture *capture;

	pthread_mutex_lock(&fake_lock);
	if (stream == stream->context->legacy) {
		pthread_mutex_unlock(&fake_lock);
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	if (stream->capture) {
		pthread_mutex_unlock(&fake_lock);
		return CUDA_ERROR_ILLEGAL_STATE;
	}
	capture = fake_object(sizeof(*capture) + 16, FAKE_DEAD);
	capture->origin = stream;
	capture->graph = graph;
	capture->mode = mode;
	capture->thread = pthread_self();
	capture->active = true;
	capture->number = ++captures_begun;
	capture->next = captures;
	captures = capture;
	stream->capture = capture;
	pthread_mutex_unlock(&fake_lock);
	return CUDA_SUCCESS;
}

static CUresult begin_new(struct fake_stream *stream, CUstreamCaptureMode mode)
{
	CUgraph graph;
	CUresult result = cuGraphCreate(&graph, 0);

	return result ? result : begin(stream, graph, mode);
}

FAKE_EXPORT cuStreamBeginCapture(CUstream stream)
{
	FAKE(cuStreamBeginCapture);
	return begin_new(fake_stream(stream, false), CU_STREAM_CAPTURE_MODE_GLOBAL);
}

FAKE_EXPORT cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
	FAKE(cuStreamBeginCapture_v2);
	return begin_new(fake_stream(stream, false), mode);
}

FAKE_EXPORT cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
	FAKE(cuStreamBeginCapture_v2_ptsz);
	return begin_new(fake_stream(stream, true), mode);
}

FAKE_EXPORT cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
					const CUgraphEdgeData *data, size_t count, CUstreamCaptureMode mode)
{
	FAKE(cuStreamBeginCaptureToGraph);
	(void)dependencies;
	(void)data;
	(void)count;
	fake_check(graph, FAKE_GRAPH, "cuStreamBeginCaptureToGraph");
	return begin(fake_stream(stream, false), graph, mode);
}

static CUresult finish(struct fake_stream *stream, CUgraph *graph)
{
	CUresult result = CUDA_SUCCESS;
	struct capture *capture;

	pthread_mutex_lock(&fake_lock);
	capture = stream->capture;
	if (!capture || capture->origin != stream) {
		pthread_mutex_unlock(&fake_lock);
		return CUDA_ERROR_ILLEGAL_STATE;
	}
	if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
		result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	if (capture->invalid)
		result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	*graph = result ? NULL : capture->graph;
	if (result != CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) {
		capture->active = false;
		stream->capture = NULL;
		for (struct fake_stream *other = capture->joined; other; other = other->next_captured)
			other->capture = NULL;
	}
	pthread_mutex_unlock(&fake_lock);
	return result;
}

FAKE_EXPORT cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
	FAKE(cuStreamEndCapture);
	return finish(fake_stream(stream, false), graph);
}

FAKE_EXPORT cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
	FAKE(cuStreamEndCapture_ptsz);
	return finish(fake_stream(stream, true), graph);
}

static CUresult status(struct fake_stream *stream, CUstreamCaptureStatus *answer)
{
	CUresult result = CUDA_SUCCESS;

	pthread_mutex_lock(&fake_lock);
	if (fake_in_the_way(stream))
		result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	else if (!stream->capture)
		*answer = CU_STREAM_CAPTURE_STATUS_NONE;
	else if (stream->capture->invalid)
		*answer = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
	else
		*answer = CU_STREAM_CAPTURE_STATUS_ACTIVE;
	pthread_mutex_unlock(&fake_lock);
	return result;
}

FAKE_EXPORT cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *answer)
{
	FAKE(cuStreamIsCapturing);
	return status(fake_stream(stream, false), answer);
}

FAKE_EXPORT cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *answer)
{
	FAKE(cuStreamIsCapturing_ptsz);
	return status(fake_stream(stream, true), answer);
}

FAKE_EXPORT cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CUstreamCaptureMode before = thread_mode;

	FAKE(cuThreadExchangeStreamCaptureMode);
	thread_mode = *mode;
	*mode = before;
	return CUDA_SUCCESS;
}
