// SPDX-License-Identifier: Apache-2.0
/*
 * The stream that a call means, and the streams that are being captured.
 *
 * Captures are kept as a list rather than a number: one whose stream or context is destroyed is over, and must not keep
 * the gate open for ever.
 */

#include "stream.h"

#include <stdlib.h>

#include "driver.h"
#include "gate.h"
#include "life.h"

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

struct stream_key stream_key_in(CUcontext current, CUstream stream, bool per_thread)
{
	if (stream_is_own(stream, per_thread))
		return (struct stream_key){ CU_STREAM_PER_THREAD, current, this_thread() };
	if (!stream || stream == CU_STREAM_LEGACY)
		return (struct stream_key){ .stream = CU_STREAM_LEGACY, .context = current };
	return (struct stream_key){ .stream = stream };
}

struct stream_key stream_key(CUstream stream, bool per_thread)
{
	struct stream_key key = stream_key_in(NULL, stream, per_thread);

	/* The others are the same in every context. */
	if ((key.thread || key.stream == CU_STREAM_LEGACY) && real.cuCtxGetCurrent(&key.context))
		key.context = NULL;
	return key;
}

CUdevice stream_device(CUstream stream, bool per_thread)
{
	CUcontext context = NULL, current = NULL;
	CUdevice ordinal = -1;

	ours_enter();
	if (stream && stream != CU_STREAM_LEGACY && !stream_is_own(stream, per_thread) && real.cuStreamGetCtx &&
	    real.cuStreamGetCtx(stream, &context))
		context = NULL;
	if (real.cuCtxGetCurrent(&current))
		current = NULL;
	if (context && context != current && !real.cuCtxPushCurrent_v2(context)) {
		if (real.cuCtxGetDevice(&ordinal))
			ordinal = -1;
		real.cuCtxPopCurrent_v2(&context);
	} else if (current && real.cuCtxGetDevice(&ordinal)) {
		ordinal = -1;
	}
	ours_leave();
	return ordinal < GG_ORDINALS ? ordinal : -1;
}

bool stream_captured(CUstream stream, bool per_thread)
{
	CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
	CUresult result;

	if (per_thread && real.cuStreamIsCapturing_ptsz)
		CALL_REAL(result, cuStreamIsCapturing_ptsz, (stream, &status));
	else
		CALL_REAL(result, cuStreamIsCapturing, (stream, &status));
	/* An error of the legacy stream, while a stream that waits for it is captured: a launch there will fail, and
	 * the driver's own answer reaches the program. Where nothing is captured the error is about something else: an
	 * allocation is charged all the same. */
	if (result)
		return stream_capturing_any();
	return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

bool stream_runs(CUstream stream, bool per_thread)
{
	return !stream_capturing_any() || !stream_captured(stream, per_thread);
}

bool stream_capture_begins(CUstream stream, bool per_thread)
{
	struct capture *capture = calloc(1, sizeof(*capture));

	if (!capture)
		return false;
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
	return true;
}

static bool matches(const struct capture *capture, const struct stream_key *key, CUcontext context)
{
	return key ? stream_same(&capture->key, key) : capture->context == context;
}

/* Take the captures of one stream, or of one context, off the list. */
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

void stream_capture_over(const struct stream_key *key)
{
	drop(key, NULL);
}

void stream_context_gone(CUcontext context)
{
	drop(NULL, context);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	captures = NULL;
	stream_captures = 0;
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
