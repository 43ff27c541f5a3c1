// SPDX-License-Identifier: Apache-2.0
#include "quiet.h"

#include "detour.h"
#include "driver.h"
#include "life.h"
#include "moment.h"
#include "ours.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CONTEXTS 64
/* Times that a call is tried before its error counts as one that stays. */
#define TRIES 3

/* A thread of the library works in a context, which must not be destroyed meanwhile. */
struct visit {
	struct visit *next;
	CUcontext context;
};

struct quiet {
	pthread_mutex_t lock;
	pthread_cond_t ask, answer, over;	/* over: a visit or the end of a context is over */
	bool waiter;			/* the waiting thread runs */
	unsigned int callers;		/* callers that wait for that thread, and ensure that no capture begins */
	uint64_t asked, done;
	bool failed;
	CUcontext context[CONTEXTS];	/* atomically read */
	size_t contexts;
	struct visit *visits;
	CUcontext ending;		/* the context that may be being destroyed; NULL: none */
};

static CUresult set_up(struct device *device)
{
	struct quiet *quiet = calloc(1, sizeof(*quiet));

	if (!quiet)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_init(&quiet->lock, NULL);
	moment_condition(&quiet->ask);
	moment_condition(&quiet->answer);
	moment_condition(&quiet->over);
	if (device->primary)
		quiet->context[quiet->contexts++] = device->primary;
	device->quiet = quiet;
	return CUDA_SUCCESS;
}

/* Return false where there are too many. */
static bool add(struct quiet *quiet, CUcontext context)
{
	bool known = false;

	for (size_t i = 0; i < CONTEXTS && !known; i++)
		known = __atomic_load_n(&quiet->context[i], __ATOMIC_RELAXED) == context;
	if (known)
		return true;
	pthread_mutex_lock(&quiet->lock);
	for (size_t i = 0; i < quiet->contexts && !known; i++)
		known = quiet->context[i] == context;
	if (!known && quiet->contexts < CONTEXTS) {
		__atomic_store_n(&quiet->context[quiet->contexts++], context, __ATOMIC_RELAXED);
		known = true;
	}
	pthread_mutex_unlock(&quiet->lock);
	return known;
}

void quiet_context(struct device *device, CUcontext context)
{
	/* No program has that many; the work in this one could not be waited for. */
	if (device->quiet && context && !add(device->quiet, context))
		device->elastic = false;
}

static void context_gone(struct device *device, CUcontext context)
{
	struct quiet *quiet = device->quiet;

	if (!quiet)
		return;
	pthread_mutex_lock(&quiet->lock);
	for (size_t i = 0; i < quiet->contexts; i++)
		if (quiet->context[i] == context) {
			__atomic_store_n(&quiet->context[i], quiet->context[--quiet->contexts], __ATOMIC_RELAXED);
			__atomic_store_n(&quiet->context[quiet->contexts], NULL, __ATOMIC_RELAXED);
			break;
		}
	pthread_mutex_unlock(&quiet->lock);
}

static void ends(struct device *device, void *context)
{
	struct quiet *quiet = device->quiet;
	struct visit *visit;

	if (!quiet)
		return;
	pthread_mutex_lock(&quiet->lock);
	quiet->ending = context;
	do {
		for (visit = quiet->visits; visit && visit->context != context; visit = visit->next)
			;
		if (visit)
			pthread_cond_wait(&quiet->over, &quiet->lock);
	} while (visit);
	pthread_mutex_unlock(&quiet->lock);
}

void quiet_context_ends(CUcontext context)
{
	device_each(ends, context);
}

static void ended(struct device *device, void *unused)
{
	struct quiet *quiet = device->quiet;

	(void)unused;
	if (!quiet)
		return;
	pthread_mutex_lock(&quiet->lock);
	quiet->ending = NULL;
	pthread_cond_broadcast(&quiet->over);
	pthread_mutex_unlock(&quiet->lock);
}

void quiet_context_ended(void)
{
	device_each(ended, NULL);
}

static bool is_answer(CUresult result)
{
	return result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY;
}

/* Repeat `call` until it gives no error, or one that stays. */
#define ASK(result, call)								\
	do {										\
		for (int try_ = 0; try_ < TRIES && !is_answer((result) = (call)); try_++)	\
			;								\
	} while (0)

bool quiet_passed(CUevent event)
{
	CUresult result;

	ASK(result, real.cuEventQuery(event));
	return result != CUDA_ERROR_NOT_READY;
}

bool quiet_ended(CUstream stream)
{
	CUresult result;

	ASK(result, real.cuStreamQuery(stream));
	return result != CUDA_ERROR_NOT_READY;
}

void quiet_await(CUevent event)
{
	CUresult ignored;

	ASK(ignored, real.cuEventSynchronize(event));
	(void)ignored;
}

/* Wait for everything that was submitted to one context. */
static bool synchronize(CUcontext context)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	CUresult result;

	ASK(result, real.cuCtxPushCurrent_v2(context));
	if (result != CUDA_SUCCESS)
		return false;
	real.cuThreadExchangeStreamCaptureMode(&mode);
	if (detour_on())
		detour_home_context(context);
	ASK(result, real.cuCtxSynchronize());
	real.cuThreadExchangeStreamCaptureMode(&mode);
	real.cuCtxPopCurrent_v2(&context);
	return result == CUDA_SUCCESS;
}

/* Do the same for a context that was known a moment ago and is not being destroyed. With the lock held, except while
 * waiting. */
static bool visit(struct quiet *quiet, CUcontext context)
{
	struct visit visit = { quiet->visits, context }, **at = &quiet->visits;
	bool known = false, done;

	for (size_t i = 0; i < quiet->contexts && !known; i++)
		known = quiet->context[i] == context;
	if (!known)
		return true;	/* it was destroyed, with its work */
	quiet->visits = &visit;
	pthread_mutex_unlock(&quiet->lock);
	done = synchronize(context);
	pthread_mutex_lock(&quiet->lock);
	while (*at != &visit)
		at = &(*at)->next;
	*at = visit.next;
	pthread_cond_broadcast(&quiet->over);
	return done;
}

CUresult quiet_drain(struct device *device)
{
	struct quiet *quiet = device->quiet;
	CUcontext contexts[CONTEXTS], current = NULL;
	CUresult result = CUDA_SUCCESS;
	size_t count;

	real.cuCtxGetCurrent(&current);
	pthread_mutex_lock(&quiet->lock);
	count = quiet->contexts;
	memcpy(contexts, quiet->context, sizeof(contexts));
	for (size_t i = 0; i < count; i++) {
		if (contexts[i] == current)
			continue;
		while (quiet->ending == contexts[i])	/* unless it stays, with its work */
			pthread_cond_wait(&quiet->over, &quiet->lock);
		visit(quiet, contexts[i]);	/* its errors are for the threads that work there */
	}
	pthread_mutex_unlock(&quiet->lock);
	if (current && detour_on())
		detour_home_context(current);
	if (current)
		result = real.cuCtxSynchronize();
	return result;
}

/*
 * cuCtxSynchronize has no deadline, so a separate thread waits in it. That thread begins no wait without a caller: by
 * then the program may be capturing a stream again, and the capture would end.
 */
static void *wait_for_contexts(void *argument)
{
	struct quiet *quiet = argument;
	CUcontext contexts[CONTEXTS];

	ours_enter();	/* for good */
	pthread_mutex_lock(&quiet->lock);
	for (;;) {
		uint64_t asked = quiet->asked;
		size_t count = quiet->contexts;
		bool failed = false;

		if (quiet->done == asked || !quiet->callers) {
			pthread_cond_wait(&quiet->ask, &quiet->lock);
			continue;
		}
		memcpy(contexts, quiet->context, sizeof(contexts));
		for (size_t i = 0; i < count && !failed; i++) {
			/* Whether work runs in a context that is being destroyed is known a moment later. */
			failed = contexts[i] == quiet->ending || !visit(quiet, contexts[i]);
			failed |= !quiet->callers;
		}
		quiet->failed = failed;
		quiet->done = asked;
		pthread_cond_broadcast(&quiet->answer);
	}
	return NULL;
}

static bool start_waiter(struct quiet *quiet)
{
	sigset_t all, before;
	pthread_t thread;

	if (quiet->waiter)
		return true;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	quiet->waiter = !pthread_create(&thread, NULL, wait_for_contexts, quiet);
	if (quiet->waiter)
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return quiet->waiter;
}

bool quiet_wait(struct device *device, uint64_t timeout_us)
{
	struct quiet *quiet = device->quiet;
	struct timespec until;
	uint64_t asked;
	bool done;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += (time_t)(timeout_us / 1000000);
	until.tv_nsec += (long)(timeout_us % 1000000) * 1000;
	if (until.tv_nsec >= 1000000000) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000;
	}
	pthread_mutex_lock(&quiet->lock);
	if (!start_waiter(quiet)) {
		pthread_mutex_unlock(&quiet->lock);
		return false;
	}
	asked = ++quiet->asked;
	quiet->callers++;
	pthread_cond_signal(&quiet->ask);
	while (quiet->done < asked)
		if (pthread_cond_timedwait(&quiet->answer, &quiet->lock, &until) == ETIMEDOUT)
			break;
	done = quiet->done >= asked && !quiet->failed;
	quiet->callers--;
	pthread_mutex_unlock(&quiet->lock);
	return done;
}

LIFE(.stage = LIFE_CONTEXTS, .set_up = set_up, .context_used = quiet_context, .context_gone = context_gone);
