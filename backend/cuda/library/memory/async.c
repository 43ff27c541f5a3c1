// SPDX-License-Identifier: Apache-2.0
#include "async.h"

#include "driver.h"
#include "life.h"
#include "parked.h"
#include "region.h"
#include "tree.h"

#include <stdlib.h>

static size_t round_bytes(size_t bytes)
{
	const size_t unit = bytes < GG_MIB ? 512 : GG_CHUNK;

	return (bytes + unit - 1) & ~(unit - 1);
}

/* The number of a stream, which no other stream of the process ever gets (CUDA
 * 12.0); 0: not known. */
static uint64_t number_of(CUstream stream, bool per_thread)
{
	unsigned long long number = 0;

	if (per_thread && real.cuStreamGetId_ptsz)
		return real.cuStreamGetId_ptsz(stream, &number) == CUDA_SUCCESS ? number : 0;
	if (!per_thread && real.cuStreamGetId)
		return real.cuStreamGetId(stream, &number) == CUDA_SUCCESS ? number : 0;
	return 0;
}

struct wish {
	struct device *device;
	uint64_t stream;
	size_t bytes;
};

static bool suits(const struct block *block, const void *argument)
{
	const struct wish *wish = argument;

	return !block->later && block->device == wish->device && block->bytes == wish->bytes &&
	       wish->stream && block->stream == wish->stream;
}

CUresult async_alloc(struct device *device, size_t bytes, CUstream stream, bool per_thread,
		     CUdeviceptr *address)
{
	struct wish wish = {
		.device = device,
		.bytes = round_bytes(bytes),
		.stream = number_of(stream, per_thread),
	};
	struct block *block;
	CUresult result;

	pthread_mutex_lock(&parked_lock);
	block = parked_take(suits, &wish);
	if (block)
		block->parked = false;
	pthread_mutex_unlock(&parked_lock);
	if (block) {
		real.cuEventDestroy_v2(block->event);
		block->event = NULL;
		*address = block->address;
		return CUDA_SUCCESS;
	}
	parked_sweep(false);
	block = calloc(1, sizeof(*block));
	if (!block)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = region_alloc(device, wish.bytes, 0, &block->address);
	if (result == CUDA_ERROR_OUT_OF_MEMORY && parked_count()) {
		parked_sweep(true);
		result = region_alloc(device, wish.bytes, 0, &block->address);
	}
	if (result != CUDA_SUCCESS) {
		free(block);
		return result;
	}
	block->device = device;
	block->bytes = wish.bytes;
	real.cuCtxGetCurrent(&block->context);
	pthread_mutex_lock(&parked_lock);
	if (!table_put(&parked_blocks, block->address, block))
		result = CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_unlock(&parked_lock);
	*address = block->address;
	if (result != CUDA_SUCCESS) {
		region_free(block->address);
		free(block);
	}
	return result;
}

/* An event in `stream`, in the context of that. */
static CUresult mark(struct block *block, CUstream stream, bool per_thread)
{
	CUcontext context = NULL, current = NULL;
	CUresult result;
	bool pushed;

	real.cuCtxGetCurrent(&current);
	if (!real.cuStreamGetCtx || !stream ||
	    real.cuStreamGetCtx(stream, &context) != CUDA_SUCCESS)
		context = current;
	pushed = context != current && real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
	result = real.cuEventCreate(&block->event, CU_EVENT_DISABLE_TIMING);
	if (result == CUDA_SUCCESS) {
		if (per_thread && real.cuEventRecord_ptsz)
			result = real.cuEventRecord_ptsz(block->event, stream);
		else
			result = real.cuEventRecord(block->event, stream);
		if (result != CUDA_SUCCESS) {
			real.cuEventDestroy_v2(block->event);
			block->event = NULL;
		}
	} else {
		block->event = NULL;
	}
	block->context = context;
	if (pushed)
		real.cuCtxPopCurrent_v2(&context);
	return result;
}

CUresult async_free(CUdeviceptr address, CUstream stream, bool per_thread)
{
	struct block *block;
	CUresult result = CUDA_ERROR_NOT_FOUND;

	pthread_mutex_lock(&parked_lock);
	block = table_get(&parked_blocks, address);
	if (block && block->parked) {
		block = NULL;
		result = CUDA_ERROR_INVALID_VALUE;
	}
	if (block)
		block->parked = true;	/* no other thread frees it meanwhile */
	pthread_mutex_unlock(&parked_lock);
	if (!block)
		return result;
	block->stream = number_of(stream, per_thread);
	result = mark(block, stream, per_thread);
	pthread_mutex_lock(&parked_lock);
	if (result == CUDA_SUCCESS)
		parked_put(block);
	else
		block->parked = false;
	pthread_mutex_unlock(&parked_lock);
	return result;
}

bool async_take(CUdeviceptr address)
{
	struct block *block;
	bool free_it = true;

	pthread_mutex_lock(&parked_lock);
	block = table_get(&parked_blocks, address);
	if (block && block->parked)
		free_it = false;
	else if (block)
		table_take(&parked_blocks, address);
	pthread_mutex_unlock(&parked_lock);
	if (free_it)
		free(block);
	return free_it;
}

bool async_is(CUdeviceptr address)
{
	pthread_mutex_lock(&parked_lock);
	bool is = table_get(&parked_blocks, address);
	pthread_mutex_unlock(&parked_lock);
	return is;
}

bool async_later(struct device *device, CUdeviceptr address)
{
	struct block *block = calloc(1, sizeof(*block));
	bool put;

	if (!block)
		return false;
	*block = (struct block){
		.device = device, .address = address, .later = true, .parked = true,
	};
	pthread_mutex_lock(&parked_lock);
	put = table_put(&parked_blocks, address, block);
	if (put)
		parked_put(block);
	pthread_mutex_unlock(&parked_lock);
	if (!put)
		free(block);
	return put;
}

struct sum {
	struct device *device;
	uint64_t used, parked;
};

static void add(uint64_t key, void *value, void *argument)
{
	const struct block *block = value;
	struct sum *sum = argument;

	(void)key;
	if (block->device == sum->device && !block->later)
		*(block->parked ? &sum->parked : &sum->used) += block->bytes;
}

void async_usage(struct device *device, uint64_t *used, uint64_t *parked_bytes)
{
	struct sum sum = { .device = device };

	pthread_mutex_lock(&parked_lock);
	table_each(&parked_blocks, add, &sum);
	pthread_mutex_unlock(&parked_lock);
	*used = sum.used;
	*parked_bytes = sum.parked;
}

static bool is_this(const struct block *block, const void *argument)
{
	return block == argument;
}

/* The regions went by themselves (region_context_gone), the events with their context. */
static void forget_gone(uint64_t key, void *value, void *argument)
{
	struct block *block = value;
	CUdeviceptr start;
	size_t bytes;
	struct device *device;

	(void)argument;
	if (region_find(key, &start, &bytes, &device))
		return;
	table_take(&parked_blocks, key);
	parked_take(is_this, block);
	free(block);
}

static void without_event(uint64_t key, void *value, void *argument)
{
	struct block *block = value;

	(void)key;
	if (block->context == argument && block->event) {
		block->event = NULL;
		block->later = true;
	}
}

static void context_gone(struct device *device, CUcontext context)
{
	if (!device->regions)
		return;
	pthread_mutex_lock(&parked_lock);
	table_each(&parked_blocks, forget_gone, NULL);
	table_each(&parked_blocks, without_event, context);
	pthread_mutex_unlock(&parked_lock);
}

LIFE(.stage = LIFE_STREAMED, .context_gone = context_gone);
