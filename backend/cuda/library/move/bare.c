// SPDX-License-Identifier: Apache-2.0
#include "bare.h"

#include <time.h>

#include "batch.h"
#include "driver.h"
#include "gate.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "pick.h"
#include "place.h"
#include "pool.h"
#include "tree.h"
#include "turn.h"
#include "view.h"

/* What fails is tried so often as a gate opens; where work is about to go to the GPU, for so long, us, and every so
 * many ns. */
#define TRIES 3
#define NEEDED_US 10000000
#define LOOK_NS 1000000
/* Chunks that are covered between two looks. */
#define MOST CHUNKS_TOGETHER

bool bare_may(const struct region *region)
{
	return !region->object && turn_may_bare(region->device) && !view_is_shared(region);
}

/* Bare chunks that are to be covered. */
struct covering {
	struct pick picks[MOST];
	bool ours[MOST];	/* that one is busy for this alone, and not given up on (batch.h) */
	size_t count;
};

static void take(struct pick *pick, void *argument)
{
	struct covering *covering = argument;
	struct chunk *chunk = &pick->region->chunk[pick->index];

	/* The thread that frees a region covers what stays of it (place_leave_region). */
	if (!place_is_bare(pick->region, pick->index) || pick->region->freeing || covering->count == MOST)
		return;
	covering->ours[covering->count] = !chunk->busy;
	covering->picks[covering->count++] = *pick;
	chunk->busy = true;
}

/* Chunks that one call covers, from `first` on. */
static struct place_run run_from(const struct covering *covering, size_t first)
{
	const struct pick *pick = &covering->picks[first];
	struct place_run run = { pick->region, pick->index, 1 };
	uint64_t bytes = chunk_bytes(pick->region, pick->index);

	for (; first + run.count < covering->count; run.count++) {
		const struct pick *next = &pick[run.count];

		if (next->region != run.region || next->index != run.first + run.count)
			break;
		bytes += chunk_bytes(next->region, next->index);
		if (bytes > PLACE_RUN_BYTES)
			break;
	}
	return run;
}

/* Covers some; false: there is none, or none can be. */
static bool cover_some(struct device *device)
{
	struct covering *covering = calloc(1, sizeof(*covering));
	bool any = false;

	if (!covering)
		return false;
	pthread_mutex_lock(&tree_lock);
	pick_each(device->regions, take, covering);
	pthread_mutex_unlock(&tree_lock);
	for (size_t i = 0; i < covering->count;) {
		const struct place_run run = run_from(covering, i);
		CUresult result = CUDA_ERROR_UNKNOWN;

		for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++) {
			result = place_enter(&run, NULL);
			/* The driver may have no memory of the GPU for page tables. */
			if (result == CUDA_ERROR_OUT_OF_MEMORY)
				pool_trim(device, 0);
		}
		if (result != CUDA_SUCCESS)
			log_line("device %d: %zu chunks cannot be mapped: error %d", device->ordinal, run.count,
				 (int)result);
		any |= result == CUDA_SUCCESS;
		i += run.count;
	}
	for (size_t i = 0; i < covering->count; i++)
		if (covering->ours[i])
			pick_put(&covering->picks[i], 1);
	free(covering);
	return any;
}

static void cover(struct device *device, void *unused)
{
	bool borrowed;

	(void)unused;
	if (!device->mover || !__atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST))
		return;
	/* The thread that moves memory may wait for this one to leave the gate. */
	gate_beg();
	pthread_mutex_lock(&device->mover->lock);
	borrowed = device_borrow(device);
	while (cover_some(device))
		;
	if (borrowed)
		device_return(device);
	pthread_mutex_unlock(&device->mover->lock);
	gate_beg_no_more();
}

static void covers(struct device *device)
{
	const uint64_t begun = moment_us();
	const unsigned int before = __atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST);
	const CUstreamCaptureMode mode = driver_enter();
	unsigned int after;

	if (device)
		cover(device, NULL);
	else
		device_each(cover, NULL);
	while ((after = __atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST)) && !device && moment_us() - begun < NEEDED_US) {
		nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
		device_each(cover, NULL);
	}
	driver_leave(mode);
	log_line("covered %u of %u bare chunks, %llu us", before - after, before,
		 (unsigned long long)(moment_us() - begun));
}

bool bare_end(void)
{
	if (__atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST))
		turn_cover_all();
	return !__atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST);
}

static CUresult set_up(struct device *device)
{
	(void)device;
	turn_covers = covers;
	return CUDA_SUCCESS;
}

LIFE(.stage = LIFE_MOVES, .set_up = set_up);
