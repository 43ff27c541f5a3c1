// SPDX-License-Identifier: Apache-2.0
#include "join.h"

#include <time.h>

#include "batch.h"
#include "daemon.h"
#include "driver.h"
#include "moment.h"
#include "object.h"
#include "ours.h"
#include "pool.h"

/* Microseconds for which a join is tried: the driver never refuses because work of the program runs. */
#define JOIN_US 5000000
/* Nanoseconds until the next try, or the next look whether the GPU has come to the copies. */
#define PAUSE_NS 5000000

static void pause_for_a_moment(void)
{
	nanosleep(&(struct timespec){ .tv_nsec = PAUSE_NS }, NULL);
}

static CUresult make(struct region *region, CUmemGenericAllocationHandle *whole)
{
	CUresult result = real.cuMemCreate(whole, region->reserved, &region->object->prop, 0);

	if (result == CUDA_ERROR_OUT_OF_MEMORY && pool_trim(region->device, 0))
		result = real.cuMemCreate(whole, region->reserved, &region->object->prop, 0);
	return result;
}

/* Wait for the copies that did not end, which have chunks of this object or others. False: one is still there. With the
 * mover's lock held. */
static bool await_stuck(struct device *device, uint64_t until)
{
	while (!batch_reap(device)) {
		if (moment_us() >= until)
			return false;
		pthread_mutex_unlock(&device->mover->lock);
		pause_for_a_moment();
		pthread_mutex_lock(&device->mover->lock);
	}
	return true;
}

/* Join a region once. `began`: the batch has the charge, and will settle it. With the mover's lock held. */
static CUresult join(struct region *region, uint64_t until, bool *began)
{
	struct device *device = region->device;
	struct pick picks[BATCH_MOST_CHUNKS];
	CUmemGenericAllocationHandle whole;
	struct batch *batch;
	CUresult result;

	if (!await_stuck(device, until))
		return CUDA_ERROR_NOT_READY;
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
	object_claim_again(region);
	*began = true;
	batch_move(device, batch);
	/* A batch that is still stuck has its own claim, and ends without this thread. */
	return await_stuck(device, until) && object_is_whole(region) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Two copies exist until the end: both are charged. */
static CUresult join_once(struct region *region, uint64_t until)
{
	struct device *device = region->device;
	bool began = false;
	CUresult result;

	if (daemon_charge(device, region->reserved))
		return CUDA_ERROR_OUT_OF_MEMORY;
	__atomic_add_fetch(&device->resident, region->reserved, __ATOMIC_RELAXED);
	pthread_mutex_lock(&device->mover->lock);
	ours_enter();
	result = join(region, until, &began);
	ours_leave();
	pthread_mutex_unlock(&device->mover->lock);
	if (!began)
		pool_uncharge(device, region->reserved);
	return result;
}

CUresult join_object(struct region *region)
{
	const uint64_t until = moment_us() + JOIN_US;
	CUresult result;

	while ((result = join_once(region, until)) == CUDA_ERROR_NOT_READY && moment_us() < until)
		pause_for_a_moment();
	return result;
}
