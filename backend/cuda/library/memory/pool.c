// SPDX-License-Identifier: Apache-2.0
/* The books, and the chunks of the GPU. */

#include "pool.h"

#include "chunk.h"
#include "daemon.h"
#include "driver.h"
#include "kept.h"
#include "life.h"
#include "log.h"
#include "moment.h"

#include <stdlib.h>

/* Most memory that is kept on the GPU for no allocation: the larger of these, for at most KEPT_MS. */
#define KEEP_BYTES (64 * GG_MIB)
#define KEEP_PART 50		/* a fiftieth, 2 % */

static CUresult set_up(struct device *device)
{
	struct pool *pool = calloc(1, sizeof(*pool));
	const char *limit = getenv("GGROUP_CUDA_POOL");
	int exportable = 0;
	CUresult result;

	if (!pool)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_init(&pool->lock, NULL);
	moment_condition(&pool->wake);
	pool->limit = limit ? strtoull(limit, NULL, 0) * GG_MIB : UINT64_MAX;
	CALL_REAL(result, cuDeviceGetAttribute,
		  (&exportable, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device->ordinal));
	pool->exportable = result == CUDA_SUCCESS && exportable;
	device->pool = pool;
	return CUDA_SUCCESS;
}

/* The books */

void pool_uncharge(struct device *device, uint64_t bytes)
{
	if (!bytes)
		return;
	__atomic_sub_fetch(&device->resident, bytes, __ATOMIC_RELAXED);
	daemon_uncharge(device, bytes, 0);
}

void pool_credit(struct device *device, uint64_t bytes)
{
	pthread_mutex_lock(&device->pool->lock);
	device->pool->credit += bytes;
	pthread_mutex_unlock(&device->pool->lock);
}

uint64_t pool_spend(struct device *device, uint64_t bytes)
{
	struct pool *pool = device->pool;

	pthread_mutex_lock(&pool->lock);
	if (bytes > pool->credit)
		bytes = pool->credit;
	pool->credit -= bytes;
	pthread_mutex_unlock(&pool->lock);
	return bytes;
}

uint64_t pool_credited(struct device *device)
{
	pthread_mutex_lock(&device->pool->lock);
	uint64_t credit = device->pool->credit;
	pthread_mutex_unlock(&device->pool->lock);
	return credit;
}

void pool_uncharge_swapped(struct device *device, uint64_t bytes)
{
	/* Memory that the daemon allowed back, and that has not come yet, is resident in the books. */
	uint64_t resident = pool_spend(device, bytes);

	if (!bytes)
		return;
	__atomic_sub_fetch(&device->resident, resident, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&device->swapped, bytes - resident, __ATOMIC_RELAXED);
	daemon_uncharge(device, resident, bytes - resident);
}

/* The GPU */

bool pool_cached(struct device *device, enum chunk_class class,
		 CUmemGenericAllocationHandle *memory)
{
	struct pool *pool = device->pool;
	struct spare spare;
	bool found;

	pthread_mutex_lock(&pool->lock);
	found = kept_take(&pool->gpu[class], &spare);
	if (found)
		pool->gpu_bytes -= class_bytes[class];
	pthread_mutex_unlock(&pool->lock);
	if (found)
		*memory = spare.memory;
	return found;
}

CUresult pool_create(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle *memory)
{
	const CUmemLocationType type = CU_MEM_LOCATION_TYPE_DEVICE;
	const uint64_t bytes = class_bytes[class];
	CUresult result = kept_make(device, type, device->ordinal, bytes, memory);

	/* Kept chunks of other sizes are in the way. */
	if (result == CUDA_ERROR_OUT_OF_MEMORY && pool_trim(device, 0))
		result = kept_make(device, type, device->ordinal, bytes, memory);
	return result;
}

void pool_give(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle memory)
{
	struct pool *pool = device->pool;
	uint64_t resident = __atomic_load_n(&device->resident, __ATOMIC_RELAXED);
	uint64_t most = resident / KEEP_PART > KEEP_BYTES ? resident / KEEP_PART : KEEP_BYTES;
	bool kept = false;

	/* While some memory of this program is in the host, freed chunks are for that. */
	if (!__atomic_load_n(&device->swapped, __ATOMIC_RELAXED)) {
		pthread_mutex_lock(&pool->lock);
		if (pool->gpu_bytes + class_bytes[class] <= most)
			kept = kept_put(&pool->gpu[class], (struct spare){ .memory = memory });
		if (kept) {
			if (!pool->gpu_bytes)
				kept_wake(device);
			pool->gpu_bytes += class_bytes[class];
		}
		pthread_mutex_unlock(&pool->lock);
	}
	if (!kept)
		pool_drop(device, class, memory);
}

void pool_drop(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle memory)
{
	kept_release(device, memory);
	pool_uncharge(device, class_bytes[class]);
}

/* Take a chunk that has been kept since `before` (ms) or earlier: the oldest of each list are at its end. With the lock
 * held. */
static struct kept *oldest(struct pool *pool, uint64_t before, enum chunk_class *class)
{
	for (*class = 0; *class < CLASSES; (*class)++) {
		struct kept **at = &pool->gpu[*class];

		while (*at && (*at)->next)
			at = &(*at)->next;
		if (*at && (*at)->since <= before) {
			struct kept *kept = *at;

			*at = NULL;
			pool->gpu_bytes -= class_bytes[*class];
			return kept;
		}
	}
	return NULL;
}

uint64_t pool_trim_since(struct device *device, uint64_t keep_bytes, uint64_t before)
{
	struct pool *pool = device->pool;
	uint64_t freed = 0;

	for (;;) {
		enum chunk_class class;
		struct kept *kept;

		pthread_mutex_lock(&pool->lock);
		kept = pool->gpu_bytes > keep_bytes ? oldest(pool, before, &class) : NULL;
		pthread_mutex_unlock(&pool->lock);
		if (!kept)
			break;
		kept_release(device, kept->spare.memory);
		freed += class_bytes[class];
		free(kept);
	}
	pool_uncharge(device, freed);
	return freed;
}

uint64_t pool_trim(struct device *device, uint64_t keep_bytes)
{
	return pool_trim_since(device, keep_bytes, UINT64_MAX);
}

uint64_t pool_kept(struct device *device)
{
	pthread_mutex_lock(&device->pool->lock);
	uint64_t bytes = device->pool->gpu_bytes;
	pthread_mutex_unlock(&device->pool->lock);
	return bytes;
}

LIFE(.stage = LIFE_CHUNKS, .set_up = set_up);
