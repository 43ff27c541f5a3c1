// SPDX-License-Identifier: Apache-2.0
#include "kept.h"

#include <signal.h>
#include <stdlib.h>

#include "driver.h"
#include "log.h"
#include "moment.h"

bool kept_take(struct kept **list, struct spare *spare)
{
	struct kept *kept = *list;

	if (!kept)
		return false;
	*list = kept->next;
	*spare = kept->spare;
	free(kept);
	return true;
}

bool kept_put(struct kept **list, struct spare spare)
{
	struct kept *kept = malloc(sizeof(*kept));

	if (!kept)
		return false;
	*kept = (struct kept){ .next = *list, .spare = spare, .since = moment_us() / 1000 };
	*list = kept;
	return true;
}

uint64_t kept_sum(const uint64_t bytes[CLASSES])
{
	uint64_t all = 0;

	for (int class = 0; class < CLASSES; class++)
		all += bytes[class];
	return all;
}

bool kept_may(const struct pool *pool, uint64_t bytes)
{
	return !pool->granted || kept_sum(pool->host_bytes) + kept_sum(pool->used) + bytes <= pool->grant;
}

CUresult kept_make(struct device *device, CUmemLocationType type, int id, uint64_t bytes,
		   CUmemGenericAllocationHandle *memory)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = device->pool->exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR :
								   CU_MEM_HANDLE_TYPE_NONE,
		.location = { .type = type, .id = id },
	};
	CUresult result;

	CALL_REAL(result, cuMemCreate, (memory, bytes, &prop, 0));
	/* The attribute describes GPU memory; there is none that says whether host memory can be exported. */
	if (device->pool->exportable &&
	    (result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_INVALID_VALUE)) {
		prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
		CALL_REAL(result, cuMemCreate, (memory, bytes, &prop, 0));
	}
	return result;
}

void kept_release(struct device *device, CUmemGenericAllocationHandle memory)
{
	CUresult result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < KEPT_TRIES && result != CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemRelease, (memory));
	if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
		log_line("device %d: cuMemRelease failed with %d", device->ordinal, result);
}

void kept_wake(struct device *device)
{
	struct pool *pool = device->pool;
	sigset_t all, before;
	pthread_attr_t attributes;
	pthread_t thread;

	if (!pool->thread) {
		sigfillset(&all);	/* the program's signals are for its own threads */
		pthread_sigmask(SIG_SETMASK, &all, &before);
		pthread_attr_init(&attributes);
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		pool->thread = !pthread_create(&thread, &attributes, pool->look_after, device);
		pthread_attr_destroy(&attributes);
		pthread_sigmask(SIG_SETMASK, &before, NULL);
	}
	pthread_cond_broadcast(&pool->wake);
}
