// SPDX-License-Identifier: Apache-2.0
#include "home.h"

#include <string.h>
#include <time.h>

#include "batch.h"
#include "chunk.h"
#include "kept.h"
#include "life.h"
#include "moment.h"
#include "ours.h"
#include "pick.h"
#include "pool.h"
#include "tree.h"

/* Microseconds in which all of it may come home. */
#define ALL_US 3000000
/* Microseconds in which a driver that is not busy with other calls makes and releases a chunk (docs/nvidia.md). */
#define QUICK_US 500
/* Milliseconds until a busy driver is tried again; and the microseconds after which it counts as always that slow. */
#define LATER_MS 50
#define PATIENCE_US 3000000
/* Bytes brought home at a time from the same GPU, or the host: so much memory exists twice meanwhile. */
#define NEAR_BYTES (64 * GG_MIB)

/* By ordinal; for the thread that handles departures. */
static struct {
	bool far;
	uint64_t since;		/* time when it was set, us */
} away[GG_ORDINALS];

void home_awaits(struct device *device, bool far)
{
	away[device->ordinal].far = far;
	away[device->ordinal].since = moment_us();
	if (far && device->mover)
		device->mover->batch_bytes = BATCH_LEAST;
}

/* Return whether the driver answers as fast as it can. With the mover's lock held. */
static bool is_quick(struct device *device)
{
	const uint64_t start = moment_us();
	CUmemGenericAllocationHandle memory;

	if (start - away[device->ordinal].since > PATIENCE_US || !device_borrow(device))
		return true;
	if (pool_create(device, CLASS_SMALL, &memory) == CUDA_SUCCESS)
		kept_release(device, memory);
	device_return(device);
	return moment_us() - start < QUICK_US;
}

/* Return the next batch to bring home. With the mover's lock held. */
static struct batch *ready(struct device *device)
{
	const size_t bytes = away[device->ordinal].far ? device->mover->batch_bytes : NEAR_BYTES;
	struct pick picks[BATCH_MOST_CHUNKS];
	struct batch *batch = NULL;
	size_t count = pick_imported(device, CHUNK_DEVICE, bytes, picks, BATCH_MOST_CHUNKS);

	if (count) {
		batch = batch_new(true, picks, count);
		if (!batch)
			pick_put(picks, count);
	} else {
		count = pick_imported(device, CHUNK_HOST, NEAR_BYTES, picks, BATCH_MOST_CHUNKS);
		if (count)
			batch = batch_new_out(device, picks, count);
	}
	if (batch)
		batch->within = batch->home = true;
	return batch;
}

int64_t home_some(struct device *device)
{
	struct mover *mover = device->mover;
	struct batch *batch = NULL;
	uint64_t moved = 0;
	bool quick;

	if (!mover || !tree_has_imported(device))
		return -1;
	pthread_mutex_lock(&mover->lock);
	ours_enter();
	quick = is_quick(device);
	if (quick && batch_reap(device))
		batch = ready(device);
	if (batch)
		moved = batch_move(device, batch);
	ours_leave();
	pthread_mutex_unlock(&mover->lock);
	if (!quick)
		return LATER_MS;
	return moved && tree_has_imported(device) ? 0 : -1;
}

void home_all(struct device *device)
{
	const uint64_t until = moment_us() + ALL_US;
	int64_t later;

	while ((later = home_some(device)) >= 0 && moment_us() < until) {
		const struct timespec moment = { .tv_nsec = later * 1000000 };

		nanosleep(&moment, NULL);
	}
}

static void forget(void)
{
	memset(away, 0, sizeof(away));
}

LIFE(.stage = LIFE_MOVES, .forget = forget);
