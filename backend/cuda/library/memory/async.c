// SPDX-License-Identifier: Apache-2.0
#include "async.h"

#include "driver.h"
#include "life.h"
#include "parked.h"
#include "region.h"
#include "tree.h"

#include <stdlib.h>
#include <string.h>

static size_t round_bytes(size_t bytes)
{
	const size_t unit = bytes < GG_MIB ? 512 : GG_CHUNK;

	return (bytes + unit - 1) & ~(unit - 1);
}

/* Return the number of a stream, which no other stream of the process ever gets (CUDA 12.0); 0 where it is unknown. */
static uint64_t number_of(CUstream stream, bool per_thread)
{
	unsigned long long number = 0;

	if (per_thread && real.cuStreamGetId_ptsz)
		return real.cuStreamGetId_ptsz(stream, &number) == CUDA_SUCCESS ? number : 0;
	if (!per_thread && real.cuStreamGetId)
		return real.cuStreamGetId(stream, &number) == CUDA_SUCCESS ? number : 0;
	return 0;
}

/* Use of the default pools, by ordinal; under the lock. */
static struct usage defaults[GG_ORDINALS];

struct wish {
	struct device *device;
	const struct usage *usage;
	uint64_t stream;
	size_t bytes;
};

static bool suits(const struct block *block, const void *argument)
{
	const struct wish *wish = argument;

	return !block->later && block->device == wish->device && block->usage == wish->usage &&
	       block->bytes == wish->bytes && wish->stream && block->stream == wish->stream;
}

CUresult async_alloc(struct device *device, struct usage *usage, size_t bytes, CUstream stream, bool per_thread,
		     CUdeviceptr *address)
{
	struct wish wish = {
		.device = device,
		.usage = usage ? usage : async_default(device),
		.bytes = round_bytes(bytes),
		.stream = number_of(stream, per_thread),
	};
	struct block *block;
	CUresult result;

	pthread_mutex_lock(&parked_lock);
	block = parked_take(suits, &wish);
	if (block) {
		block->parked = false;
		block_is(block, BLOCK_USED);
	}
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
	if (table_put(&parked_blocks, block->address, block)) {
		block_of(block, usage ? usage : async_default(device));
		block_is(block, BLOCK_USED);
	} else {
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&parked_lock);
	*address = block->address;
	if (result != CUDA_SUCCESS) {
		region_free(block->address);
		free(block);
	}
	return result;
}

/* Record an event in `stream`, in that stream's context. */
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
	if (result == CUDA_SUCCESS) {
		parked_put(block);
		block_is(block, BLOCK_PARKED);
	} else {
		block->parked = false;
	}
	pthread_mutex_unlock(&parked_lock);
	return result;
}

bool async_take(CUdeviceptr address)
{
	struct block *block;
	bool free_it = true;

	pthread_mutex_lock(&parked_lock);
	block = table_get(&parked_blocks, address);
	if (block && block->parked) {
		free_it = false;
	} else if (block) {
		table_take(&parked_blocks, address);
		block_of(block, NULL);
	}
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

bool async_pool(CUdeviceptr address, CUmemoryPool *pool)
{
	pthread_mutex_lock(&parked_lock);
	const struct block *block = table_get(&parked_blocks, address);

	*pool = block && block->usage ? block->usage->pool : NULL;
	pthread_mutex_unlock(&parked_lock);
	return block;
}

/* The pools */

struct usage *async_default(const struct device *device)
{
	return &defaults[device->ordinal];
}

struct usage *async_usage_new(CUmemoryPool pool)
{
	struct usage *usage = calloc(1, sizeof(*usage));

	if (usage)
		usage->pool = pool;
	return usage;
}

void async_usage_gone(struct usage *usage)
{
	pthread_mutex_lock(&parked_lock);
	usage->gone = true;
	usage->pool = NULL;	/* another pool may get that value */
	const bool empty = !usage->blocks;
	pthread_mutex_unlock(&parked_lock);
	if (empty)
		free(usage);
}

bool async_usage_empty(const struct usage *usage)
{
	pthread_mutex_lock(&parked_lock);
	const bool empty = !usage->blocks;
	pthread_mutex_unlock(&parked_lock);
	return empty;
}

uint64_t async_usage_get(const struct usage *usage, CUmemPool_attribute attribute)
{
	uint64_t bytes = 0;

	pthread_mutex_lock(&parked_lock);
	if (attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
		bytes = usage->used;
	else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
		bytes = usage->used_high;
	else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
		bytes = usage->used + usage->parked;
	else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
		bytes = usage->reserved_high;
	pthread_mutex_unlock(&parked_lock);
	return bytes;
}

void async_usage_reset(struct usage *usage, CUmemPool_attribute attribute)
{
	pthread_mutex_lock(&parked_lock);
	if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
		usage->used_high = usage->used;
	else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
		usage->reserved_high = usage->used + usage->parked;
	pthread_mutex_unlock(&parked_lock);
}

static bool is_this(const struct block *block, const void *argument)
{
	return block == argument;
}

/* The regions went already (region_context_gone), the events with their context. */
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
	block_of(block, NULL);
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

static void forget(void)
{
	memset(defaults, 0, sizeof(defaults));
}

LIFE(.stage = LIFE_STREAMED, .context_gone = context_gone, .forget = forget);
