// SPDX-License-Identifier: Apache-2.0
#include "host.h"

#include "driver.h"
#include "kept.h"
#include "moment.h"

static void host_destroy(struct device *device, enum chunk_class class, struct spare spare)
{
	CUresult unmapped = CUDA_ERROR_UNKNOWN, result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < KEPT_TRIES && unmapped != CUDA_SUCCESS; try++)
		CALL_REAL(unmapped, cuMemUnmap, (spare.window, class_bytes[class]));
	if (unmapped == CUDA_SUCCESS)
		for (int try = 0; try < KEPT_TRIES && result != CUDA_SUCCESS; try++)
			CALL_REAL(result, cuMemAddressFree, (spare.window, class_bytes[class]));
	kept_release(device, spare.memory);
}

CUresult host_make(struct device *device, enum chunk_class class, struct spare *spare)
{
	const uint64_t bytes = class_bytes[class];
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult result, ignored;

	result = kept_make(device, CU_MEM_LOCATION_TYPE_HOST_NUMA, device->host_node, bytes, &spare->memory);
	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemAddressReserve, (&spare->window, bytes, 0, 0, 0));
	if (result != CUDA_SUCCESS)
		goto release;
	CALL_REAL(result, cuMemMap, (spare->window, bytes, 0, spare->memory, 0));
	if (result != CUDA_SUCCESS)
		goto free;
	CALL_REAL(result, cuMemSetAccess, (spare->window, bytes, &access, 1));
	if (result == CUDA_SUCCESS)
		return CUDA_SUCCESS;
	host_destroy(device, class, *spare);
	return result;
free:
	CALL_REAL(ignored, cuMemAddressFree, (spare->window, bytes));
	(void)ignored;
release:
	kept_release(device, spare->memory);
	return result;
}

void host_count(struct device *device)
{
	const struct pool *pool = device->pool;
	const uint64_t used = kept_sum(pool->used), clean = kept_sum(pool->clean), peak = kept_sum(pool->peak);

	__atomic_store_n(&device->clean, clean, __ATOMIC_RELAXED);
	__atomic_store_n(&device->host_used, used - clean, __ATOMIC_RELAXED);
	__atomic_store_n(&device->host_held, used + kept_sum(pool->host_bytes), __ATOMIC_RELAXED);
	/* What was needed at once before is kept until the program ends. */
	__atomic_store_n(&device->host_wanted, pool->wanted > peak ? pool->wanted : peak, __ATOMIC_RELAXED);
}

/* Of the class that there is most of beyond what is to be ready. With the lock; CLASSES: none is kept. */
static enum chunk_class surplus(const struct pool *pool)
{
	enum chunk_class found = CLASSES;
	int64_t most = INT64_MIN;

	for (enum chunk_class class = 0; class < CLASSES; class++) {
		const int64_t over = (int64_t)(pool->host_bytes[class] + pool->used[class]) -
				     (int64_t)pool->goal[class];

		if (pool->host[class] && over > most) {
			most = over;
			found = class;
		}
	}
	return found;
}

void host_is_copy(struct device *device, enum chunk_class class, bool is_copy)
{
	pthread_mutex_lock(&device->pool->lock);
	device->pool->clean[class] += is_copy ? class_bytes[class] : -class_bytes[class];
	host_count(device);
	pthread_mutex_unlock(&device->pool->lock);
}

uint64_t host_copies(struct device *device, enum chunk_class class)
{
	pthread_mutex_lock(&device->pool->lock);
	uint64_t bytes = device->pool->clean[class];
	pthread_mutex_unlock(&device->pool->lock);
	return bytes;
}

bool host_is_short(struct device *device, enum chunk_class class)
{
	pthread_mutex_lock(&device->pool->lock);
	bool is_short = !device->pool->host[class] && !kept_may(device->pool, class_bytes[class]);
	pthread_mutex_unlock(&device->pool->lock);
	return is_short;
}

bool host_shed(struct device *device)
{
	struct pool *pool = device->pool;
	enum chunk_class class;
	struct spare spare;
	bool found;

	pthread_mutex_lock(&pool->lock);
	class = kept_may(pool, 0) ? CLASSES : surplus(pool);
	found = class < CLASSES && kept_take(&pool->host[class], &spare);
	if (found)
		pool->host_bytes[class] -= class_bytes[class];
	host_count(device);
	pthread_mutex_unlock(&pool->lock);
	if (found)
		host_destroy(device, class, spare);
	return found;
}

CUresult host_take(struct device *device, enum chunk_class class, struct spare *spare)
{
	struct pool *pool = device->pool;
	CUresult result = CUDA_SUCCESS;
	uint64_t start;
	bool found;

	pthread_mutex_lock(&pool->lock);
	found = kept_take(&pool->host[class], spare);
	if (found)
		pool->host_bytes[class] -= class_bytes[class];
	pthread_mutex_unlock(&pool->lock);
	start = moment_us();
	if (!found)
		result = host_make(device, class, spare);
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&pool->lock);
	pool->made_us += found ? 0 : moment_us() - start;
	pool->used[class] += class_bytes[class];
	if (pool->used[class] > pool->peak[class])
		pool->peak[class] = pool->used[class];
	if (!kept_may(pool, 0))
		kept_wake(device);	/* there may be some of another class */
	host_count(device);
	pthread_mutex_unlock(&pool->lock);
	return CUDA_SUCCESS;
}

void host_give(struct device *device, enum chunk_class class, struct spare spare)
{
	struct pool *pool = device->pool;
	bool kept = false;

	pthread_mutex_lock(&pool->lock);
	pool->used[class] -= class_bytes[class];
	/* As much as was needed at once before may be again. */
	uint64_t most = pool->goal[class];

	if (pool->peak[class] > most)
		most = pool->peak[class];

	if (!pool->halted && pool->host_bytes[class] + pool->used[class] + class_bytes[class] <= most &&
	    kept_may(pool, class_bytes[class]))
		kept = kept_put(&pool->host[class], spare);
	if (kept)
		pool->host_bytes[class] += class_bytes[class];
	host_count(device);
	pthread_mutex_unlock(&pool->lock);
	if (!kept)
		host_destroy(device, class, spare);
}

void host_drop(struct device *device, enum chunk_class class, struct spare spare)
{
	struct pool *pool = device->pool;

	pthread_mutex_lock(&pool->lock);
	pool->used[class] -= class_bytes[class];
	host_count(device);
	pthread_mutex_unlock(&pool->lock);
	host_destroy(device, class, spare);
}

void host_halt(struct device *device)
{
	struct pool *pool = device->pool;
	struct spare spare;

	pthread_mutex_lock(&pool->lock);
	pool->halted = true;
	while (pool->making)
		pthread_cond_wait(&pool->wake, &pool->lock);
	for (enum chunk_class class = 0; class < CLASSES; class++)
		while (kept_take(&pool->host[class], &spare)) {
			pool->host_bytes[class] -= class_bytes[class];
			pthread_mutex_unlock(&pool->lock);
			host_destroy(device, class, spare);
			pthread_mutex_lock(&pool->lock);
		}
	host_count(device);
	pthread_mutex_unlock(&pool->lock);
}

void host_resume(struct device *device)
{
	struct pool *pool = device->pool;

	pthread_mutex_lock(&pool->lock);
	pool->halted = false;
	pthread_cond_broadcast(&pool->wake);
	pthread_mutex_unlock(&pool->lock);
}

uint64_t host_made_us(struct device *device)
{
	pthread_mutex_lock(&device->pool->lock);
	uint64_t us = device->pool->made_us;
	pthread_mutex_unlock(&device->pool->lock);
	return us;
}

uint64_t host_kept(struct device *device)
{
	uint64_t bytes = 0;

	pthread_mutex_lock(&device->pool->lock);
	for (int class = 0; class < CLASSES; class++)
		bytes += device->pool->host_bytes[class];
	pthread_mutex_unlock(&device->pool->lock);
	return bytes;
}
