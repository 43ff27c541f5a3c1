// SPDX-License-Identifier: Apache-2.0
#include "join.h"

#include <time.h>

#include "batch.h"
#include "daemon.h"
#include "driver.h"
#include "object.h"
#include "ours.h"
#include "pool.h"

#define TRIES 3
/* How often to look whether the GPU has come to the copies, ns. */
#define LOOK_NS 5000000

/* What of it is in the host comes: from now on it is on the GPU in the books. */
static CUresult charge(struct device *device, uint64_t bytes)
{
	if (!bytes)
		return CUDA_SUCCESS;
	if (daemon_charge(device, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	daemon_uncharge(device, 0, bytes);
	__atomic_add_fetch(&device->resident, bytes, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&device->swapped, bytes, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

static CUresult make(struct region *region, CUmemGenericAllocationHandle *whole)
{
	CUresult result = real.cuMemCreate(whole, region->reserved, &region->object->prop, 0);

	if (result == CUDA_ERROR_OUT_OF_MEMORY && pool_trim(region->device, 0))
		result = real.cuMemCreate(whole, region->reserved, &region->object->prop, 0);
	return result;
}

/* With the mover's lock. A copy that does not end has chunks of ours: what it leaves is waited for. */
static void await_stuck(struct device *device)
{
	const struct timespec moment = { .tv_nsec = LOOK_NS };

	while (!batch_reap(device)) {
		pthread_mutex_unlock(&device->mover->lock);
		nanosleep(&moment, NULL);
		pthread_mutex_lock(&device->mover->lock);
	}
}

/* With the mover's lock. */
static CUresult join(struct region *region)
{
	struct device *device = region->device;
	struct pick picks[BATCH_MOST_CHUNKS];
	CUmemGenericAllocationHandle whole;
	struct batch *batch;
	CUresult result;
	uint64_t moved;

	await_stuck(device);
	for (size_t i = 0; i < region->chunks; i++)
		picks[i] = (struct pick){ region, i };
	batch = batch_new(true, picks, region->chunks);
	if (!batch)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = make(region, &whole);
	if (result != CUDA_SUCCESS) {
		batch_free(batch);
		return result;
	}
	batch->within = batch->join = true;
	batch->joined = whole;
	moved = batch_move(device, batch);
	await_stuck(device);
	return moved ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult join_object(struct region *region)
{
	struct device *device = region->device;
	CUresult result;
	uint64_t need = 0;

	for (size_t i = 0; i < region->chunks; i++)
		need += region->chunk[i].place == CHUNK_HOST ? chunk_bytes(region, i) : 0;
	result = charge(device, need);
	if (result != CUDA_SUCCESS)
		return result;
	result = CUDA_ERROR_NOT_SUPPORTED;
	for (int try = 0; try < TRIES && result == CUDA_ERROR_NOT_SUPPORTED; try++) {
		pthread_mutex_lock(&device->mover->lock);
		ours_enter();
		result = join(region);
		ours_leave();
		pthread_mutex_unlock(&device->mover->lock);
	}
	if (result != CUDA_SUCCESS && need)	/* it stays in the host, and may come */
		pool_credit(device, need);
	return result;
}
