// SPDX-License-Identifier: Apache-2.0
/*
 * Streams and events. Each stream has a thread that runs queued work in order. The legacy stream waits for everything
 * queued before it in the blocking streams of its context, and they wait for it.
 */

#include "internal.h"

#include <stdlib.h>
#include <string.h>

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed = PTHREAD_COND_INITIALIZER;

struct wait {
	struct fake_stream *stream;
	uint64_t number;
};

struct operation {
	struct operation *next;
	struct job *job;	/* NULL: it only waits */
	size_t waits;
	struct wait wait[];
};

/* A thread's own stream in a context: CU_STREAM_PER_THREAD. */
static __thread struct own {
	struct own *next;
	CUcontext context;
	struct fake_stream *stream;
} *own;
static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

struct job *fake_job(void (*work)(void *), void *argument, void (*done)(void *))
{
	struct job *job = malloc(sizeof(*job));

	if (!job)
		fake_die("out of memory");
	*job = (struct job){ work, argument, done, 1 };
	return job;
}

void fake_job_get(struct job *job)
{
	__atomic_add_fetch(&job->references, 1, __ATOMIC_RELAXED);
}

void fake_job_put(struct job *job)
{
	if (!job || __atomic_sub_fetch(&job->references, 1, __ATOMIC_ACQ_REL))
		return;
	if (job->done)
		job->done(job->argument);
	free(job);
}

static bool ready(struct operation *operation)
{
	for (size_t i = 0; i < operation->waits; i++)
		if (operation->wait[i].stream->done < operation->wait[i].number)
			return false;
	return true;
}

static void *run(void *argument)
{
	struct fake_stream *stream = argument;

	pthread_mutex_lock(&fake_lock);
	for (;;) {
		struct operation *operation = stream->first;

		if (!operation && stream->ending)
			break;
		if (!operation || !ready(operation)) {
			pthread_cond_wait(&fake_changed, &fake_lock);
			continue;
		}
		stream->first = operation->next;
		if (!stream->first)
			stream->last = NULL;
		pthread_mutex_unlock(&fake_lock);
		fake_run_on(stream->context->groups);
		if (operation->job)
			operation->job->work(operation->job->argument);
		fake_job_put(operation->job);
		free(operation);
		pthread_mutex_lock(&fake_lock);
		stream->done++;
		pthread_cond_broadcast(&fake_changed);
	}
	stream->running = false;
	pthread_cond_broadcast(&fake_changed);
	pthread_mutex_unlock(&fake_lock);
	return NULL;
}

/* fake_lock is held, here and in all functions below that are no entry points. */
static void append(struct fake_stream *stream, struct operation *operation)
{
	pthread_attr_t attributes;
	pthread_t thread;

	operation->next = NULL;
	if (stream->last)
		stream->last->next = operation;
	else
		stream->first = operation;
	stream->last = operation;
	stream->queued++;
	if (!stream->running) {
		stream->running = true;
		pthread_attr_init(&attributes);
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		if (pthread_create(&thread, &attributes, run, stream))
			fake_die("no thread for a stream");
		pthread_attr_destroy(&attributes);
	}
	pthread_cond_broadcast(&fake_changed);
}

static struct operation *operation_with(size_t waits)
{
	struct operation *operation = calloc(1, sizeof(*operation) + waits * sizeof(struct wait));

	if (!operation)
		fake_die("out of memory");
	return operation;
}

void fake_queue(struct fake_stream *stream, struct job *job)
{
	CUcontext context = stream->context;
	struct operation *operation;
	size_t count = 1;

	for (struct fake_stream *other = context->streams; other; other = other->next)
		count++;
	operation = operation_with(count);
	operation->job = job;
	if (job)
		fake_job_get(job);
	for (struct fake_stream *other = context->streams; other; other = other->next) {
		bool wait = stream == context->legacy ? other->blocking : other == context->legacy;

		if (other == stream || !wait || (stream != context->legacy && !stream->blocking))
			continue;
		operation->wait[operation->waits++] = (struct wait){ other, other->queued };
	}
	append(stream, operation);
}

void fake_room(struct fake_stream *stream)
{
	const uint64_t most = fake_number("FAKE_QUEUE", 0);

	pthread_mutex_lock(&fake_lock);
	while (most && !stream->capture && stream->queued - stream->done >= most)
		pthread_cond_wait(&fake_changed, &fake_lock);
	pthread_mutex_unlock(&fake_lock);
}

static struct fake_stream *make(CUcontext context, bool blocking)
{
	struct fake_stream *stream = fake_object(sizeof(*stream), FAKE_STREAM);

	stream->context = context;
	stream->blocking = blocking;
	stream->next = context->streams;
	context->streams = stream;
	return stream;
}

static void end(struct fake_stream *stream)
{
	stream->ending = true;
	__atomic_store_n(&stream->kind, FAKE_DEAD, __ATOMIC_RELEASE);
	pthread_cond_broadcast(&fake_changed);
}

/* End the streams of a thread that ends, once their work has run. */
static void own_end(void *first)
{
	pthread_mutex_lock(&fake_lock);
	for (struct own *item = first, *next; item; item = next) {
		next = item->next;
		if (item->stream->kind == FAKE_STREAM)
			end(item->stream);
		free(item);
	}
	own = NULL;
	pthread_mutex_unlock(&fake_lock);
}

static void own_key_make(void)
{
	if (pthread_key_create(&own_key, own_end))
		fake_die("no key");
}

static struct fake_stream *own_stream(CUcontext context)
{
	struct own *item = own;

	while (item && (item->context != context || item->stream->kind == FAKE_DEAD))
		item = item->next;
	if (!item) {
		item = malloc(sizeof(*item));
		if (!item)
			fake_die("out of memory");
		*item = (struct own){ own, context, make(context, true) };
		own = item;
		pthread_once(&own_once, own_key_make);
		pthread_setspecific(own_key, own);
	}
	return item->stream;
}

struct fake_stream *fake_stream(CUstream handle, bool per_thread)
{
	CUcontext context = fake_context();
	struct fake_stream *stream = (struct fake_stream *)handle;

	if (!context)
		fake_die("a stream is used with no context current");
	fake_check(context, FAKE_CONTEXT, "the current context");
	if (handle == CU_STREAM_PER_THREAD || (!handle && per_thread)) {
		pthread_mutex_lock(&fake_lock);
		stream = own_stream(context);
		pthread_mutex_unlock(&fake_lock);
		return stream;
	}
	if (!handle || handle == CU_STREAM_LEGACY) {
		pthread_mutex_lock(&fake_lock);
		if (!context->legacy)
			context->legacy = make(context, true);
		stream = context->legacy;
		pthread_mutex_unlock(&fake_lock);
		return stream;
	}
	fake_check(stream, FAKE_STREAM, "a stream");
	return stream;
}

CUcontext fake_stream_context(struct fake_stream *stream)
{
	return stream->context;
}

struct fake_stream *fake_stream_make(CUcontext context, bool blocking, int priority)
{
	struct fake_stream *stream = make(context, blocking);

	stream->priority = priority;
	return stream;
}

static void drain(struct fake_stream *stream)
{
	uint64_t number = stream->queued;

	while (stream->done < number)
		pthread_cond_wait(&fake_changed, &fake_lock);
}

void fake_drain_stream(struct fake_stream *stream)
{
	pthread_mutex_lock(&fake_lock);
	if (stream->capture)
		fake_die("a stream is waited for while it is captured");
	drain(stream);
	pthread_mutex_unlock(&fake_lock);
}

void fake_drain_context(CUcontext context)
{
	pthread_mutex_lock(&fake_lock);
	for (struct fake_stream *stream = context->streams; stream; stream = stream->next) {
		if (stream->capture)
			fake_die("a context is waited for while a stream of it is captured");
		drain(stream);
	}
	pthread_mutex_unlock(&fake_lock);
	/* A primary context is waited for with its green ones (cuCtxSynchronize). */
	for (CUcontext green = context->parent ? NULL : __atomic_load_n(&context->next_green, __ATOMIC_ACQUIRE); green;
	     green = __atomic_load_n(&green->next_green, __ATOMIC_ACQUIRE))
		fake_drain_context(green);
}

void fake_end_streams(CUcontext context)
{
	pthread_mutex_lock(&fake_lock);
	for (struct fake_stream *stream = context->streams; stream; stream = stream->next) {
		drain(stream);
		if (stream->kind == FAKE_STREAM)
			end(stream);
		while (stream->running)
			pthread_cond_wait(&fake_changed, &fake_lock);
	}
	for (CUevent event = context->events; event; event = event->next)
		__atomic_store_n(&event->kind, FAKE_DEAD, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&fake_lock);
}

FAKE_EXPORT cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	FAKE(cuStreamCreateWithPriority);
	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&fake_lock);
	*stream = (CUstream)fake_stream_make(fake_context(), !(flags & CU_STREAM_NON_BLOCKING), priority);
	pthread_mutex_unlock(&fake_lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuStreamCreate(CUstream *stream, unsigned int flags)
{
	FAKE(cuStreamCreate);
	return cuStreamCreateWithPriority(stream, flags, 0);
}

FAKE_EXPORT cuStreamDestroy_v2(CUstream handle)
{
	struct fake_stream *stream = (struct fake_stream *)handle;

	FAKE(cuStreamDestroy_v2);
	if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
		return CUDA_ERROR_INVALID_HANDLE;
	fake_check(stream, FAKE_STREAM, "cuStreamDestroy");
	pthread_mutex_lock(&fake_lock);
	if (stream->capture)
		fake_die("cuStreamDestroy: the stream is captured");
	end(stream);
	pthread_mutex_unlock(&fake_lock);
	return CUDA_SUCCESS;
}

static CUresult synchronize(struct fake_stream *stream)
{
	CUresult result = fake_unsafe();

	if (!result)
		fake_drain_stream(stream);
	return result;
}

FAKE_EXPORT cuStreamSynchronize(CUstream stream)
{
	FAKE(cuStreamSynchronize);
	return synchronize(fake_stream(stream, false));
}

FAKE_EXPORT cuStreamSynchronize_ptsz(CUstream stream)
{
	FAKE(cuStreamSynchronize_ptsz);
	return synchronize(fake_stream(stream, true));
}

static CUresult query(struct fake_stream *stream)
{
	CUresult result = fake_unsafe();

	if (result)
		return result;
	pthread_mutex_lock(&fake_lock);
	if (stream->capture)
		fake_die("cuStreamQuery: the stream is captured");
	if (stream->done < stream->queued)
		result = CUDA_ERROR_NOT_READY;
	pthread_mutex_unlock(&fake_lock);
	return result;
}

FAKE_EXPORT cuStreamQuery(CUstream stream)
{
	FAKE(cuStreamQuery);
	return query(fake_stream(stream, false));
}

FAKE_EXPORT cuStreamQuery_ptsz(CUstream stream)
{
	FAKE(cuStreamQuery_ptsz);
	return query(fake_stream(stream, true));
}

FAKE_EXPORT cuStreamGetCtx(CUstream stream, CUcontext *context)
{
	FAKE(cuStreamGetCtx);
	*context = fake_stream(stream, false)->context;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuStreamGetFlags(CUstream stream, unsigned int *flags)
{
	FAKE(cuStreamGetFlags);
	*flags = fake_stream(stream, false)->blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuStreamGetPriority(CUstream stream, int *priority)
{
	FAKE(cuStreamGetPriority);
	*priority = fake_stream(stream, false)->priority;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	FAKE(cuCtxGetStreamPriorityRange);
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

/* Events */

FAKE_EXPORT cuEventCreate(CUevent *event, unsigned int flags)
{
	CUcontext context = fake_context();

	FAKE(cuEventCreate);
	(void)flags;
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	fake_check(context, FAKE_CONTEXT, "cuEventCreate");
	*event = fake_object(sizeof(**event), FAKE_EVENT);
	(*event)->context = context;
	pthread_mutex_lock(&fake_lock);
	(*event)->next = context->events;
	context->events = *event;
	pthread_mutex_unlock(&fake_lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuEventDestroy_v2(CUevent event)
{
	FAKE(cuEventDestroy_v2);
	fake_check(event, FAKE_EVENT, "cuEventDestroy");
	__atomic_store_n(&event->kind, FAKE_DEAD, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

static CUresult record(CUevent event, struct fake_stream *stream)
{
	fake_check(event, FAKE_EVENT, "cuEventRecord");
	if (event->context != stream->context)
		return CUDA_ERROR_INVALID_HANDLE;
	fake_room(stream);
	pthread_mutex_lock(&fake_lock);
	if (fake_in_the_way(stream))
		fake_die("cuEventRecord: on the legacy stream while a stream that waits for it is captured");
	event->capture = stream->capture;
	if (stream->capture) {
		struct job *job = NULL;

		event->capture_number = stream->capture->number;
		fake_graph_add(stream->capture->graph, CU_GRAPH_NODE_TYPE_EVENT_RECORD, job);
	} else {
		fake_queue(stream, NULL);
		event->stream = stream;
		event->number = stream->queued;
	}
	pthread_mutex_unlock(&fake_lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuEventRecord(CUevent event, CUstream stream)
{
	FAKE(cuEventRecord);
	return record(event, fake_stream(stream, false));
}

FAKE_EXPORT cuEventRecord_ptsz(CUevent event, CUstream stream)
{
	FAKE(cuEventRecord_ptsz);
	return record(event, fake_stream(stream, true));
}

FAKE_EXPORT cuEventQuery(CUevent event)
{
	CUresult result;

	FAKE(cuEventQuery);
	fake_check(event, FAKE_EVENT, "cuEventQuery");
	result = fake_unsafe();
	if (result)
		return result;
	pthread_mutex_lock(&fake_lock);
	if (event->capture)
		fake_die("cuEventQuery: the event was last recorded in a capture");
	if (event->stream && event->stream->capture && event->stream->capture->origin == event->stream)
		fake_die("cuEventQuery: the event's stream is captured");
	if (event->stream && event->stream->done < event->number)
		result = CUDA_ERROR_NOT_READY;
	pthread_mutex_unlock(&fake_lock);
	return result;
}

FAKE_EXPORT cuEventSynchronize(CUevent event)
{
	CUresult result;

	FAKE(cuEventSynchronize);
	fake_check(event, FAKE_EVENT, "cuEventSynchronize");
	result = fake_unsafe();
	if (result)
		return result;
	pthread_mutex_lock(&fake_lock);
	if (event->capture)
		fake_die("cuEventSynchronize: the event was last recorded in a capture");
	while (event->stream && event->stream->done < event->number)
		pthread_cond_wait(&fake_changed, &fake_lock);
	pthread_mutex_unlock(&fake_lock);
	return CUDA_SUCCESS;
}

static CUresult wait_event(struct fake_stream *stream, CUevent event)
{
	CUresult result = CUDA_SUCCESS;

	fake_check(event, FAKE_EVENT, "cuStreamWaitEvent");
	pthread_mutex_lock(&fake_lock);
	if (fake_in_the_way(stream))
		fake_die("cuStreamWaitEvent: on the legacy stream while a stream that waits for it is captured");
	if (event->capture && event->capture->active && event->capture->number == event->capture_number) {
		/* The stream joins the capture. */
		if (stream->capture && stream->capture != event->capture)
			result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
		else if (stream == stream->context->legacy)
			result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
		else if (!stream->capture) {
			stream->capture = event->capture;
			stream->next_captured = event->capture->joined;
			event->capture->joined = stream;
		}
	} else if (event->capture) {
		result = CUDA_ERROR_CAPTURED_EVENT;
	} else if (stream->capture) {
		result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	} else if (event->stream) {
		struct operation *operation = operation_with(1);

		operation->wait[operation->waits++] = (struct wait){ event->stream, event->number };
		append(stream, operation);
	}
	pthread_mutex_unlock(&fake_lock);
	return result;
}

FAKE_EXPORT cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	FAKE(cuStreamWaitEvent);
	(void)flags;
	return wait_event(fake_stream(stream, false), event);
}

FAKE_EXPORT cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags)
{
	FAKE(cuStreamWaitEvent_ptsz);
	(void)flags;
	return wait_event(fake_stream(stream, true), event);
}
