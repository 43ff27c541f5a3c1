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

/* For how long all of it may come, us. */
#define ALL_US 3000000
/* A driver that makes a chunk and lets go of it within this, us, is not busy with others (docs/nvidia.md). */
#define QUICK_US 500
/* ... and is asked again so much later, ms, but for no longer than that, us: then it is as slow as this always. */
#define LATER_MS 50
#define PATIENCE_US 3000000
/* Of the same GPU, or of the host, at a time: as much is there twice meanwhile. */
#define NEAR_BYTES (64 * GG_MIB)

/* By ordinal; of whoever is at departures. */
static struct {
	bool far;
	uint64_t since;		/* when it was made known, us */
} away[GG_ORDINALS];

void home_awaits(struct device *device, bool far)
{
	away[device->ordinal].far = far;
	away[device->ordinal].since = moment_us();
	if (far && device->mover)
		device->mover->batch_bytes = BATCH_LEAST;
}

/* Whether the driver answers as fast as it can. With the mover's lock. */
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

/* With the mover's lock. */
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
