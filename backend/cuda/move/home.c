// SPDX-License-Identifier: Apache-2.0
#include "home.h"

#include <string.h>

#include "batch.h"

/* For how long all of it may come, us. */
#define ALL_US 3000000
/* Of the same GPU, or of the host, at a time: as much is there twice meanwhile. */
#define NEAR_BYTES (64 * GG_MIB)

static bool is_far[GG_ORDINALS];	/* by ordinal; of whoever is at departures */

void home_is_far(struct device *device, bool far)
{
	is_far[device->ordinal] = far;
}

/* With the mover's lock. */
static struct batch *ready(struct device *device)
{
	const size_t bytes = is_far[device->ordinal] ? device->mover->batch_bytes : NEAR_BYTES;
	struct pick picks[BATCH_MOST_CHUNKS];
	struct batch *batch = NULL;
	size_t count = region_pick_imported(device, CHUNK_DEVICE, bytes, picks, BATCH_MOST_CHUNKS);

	if (count) {
		batch = batch_new(true, picks, count);
		if (!batch)
			region_put(picks, count);
	} else {
		count = region_pick_imported(device, CHUNK_HOST, NEAR_BYTES, picks, BATCH_MOST_CHUNKS);
		if (count)
			batch = batch_new_out(device, picks, count);
	}
	if (batch)
		batch->within = batch->home = true;
	return batch;
}

bool home_some(struct device *device)
{
	struct mover *mover = device->mover;
	struct batch *batch;
	uint64_t moved;

	if (!mover || !region_has_imported(device))
		return false;
	pthread_mutex_lock(&mover->lock);
	state_enter();
	batch = batch_reap(device) ? ready(device) : NULL;
	moved = batch ? batch_move(device, batch) : 0;
	state_leave();
	pthread_mutex_unlock(&mover->lock);
	return moved && region_has_imported(device);
}

void home_all(struct device *device)
{
	const uint64_t until = state_now_us() + ALL_US;

	while (home_some(device) && state_now_us() < until)
		;
}

void home_forget(void)
{
	memset(is_far, 0, sizeof(is_far));
}
