// SPDX-License-Identifier: Apache-2.0
#include "mover.h"

#include "batch.h"
#include "chunk.h"
#include "daemon.h"
#include "driver.h"
#include "keeper.h"
#include "life.h"
#include "moment.h"
#include "object.h"
#include "ours.h"
#include "pick.h"
#include "pool.h"
#include "tree.h"

#include <stdlib.h>
#include <time.h>

/* Bytes that move together at first (batch.c). */
#define BATCH_FIRST (512 * GG_MIB)
/* For how long a copy is waited for: it takes milliseconds, unless the GPU does not run this process at all
 * (frozen). */
#ifndef COPY_US
#define COPY_US 1000000
#endif
/* For how long the gate may be closed for what runs, while none of it ends. */
#define WORK_US 300000
#define TRIES 3
#define MOST BATCH_MOST_CHUNKS
/* It takes as much memory of the GPU again while it changes, in no books: a large chunk at most. */
#define SHARED_AT_ONCE 1
/* For how long the next of it is tried, us, and until it is tried again, ns: the driver never refuses because something
 * of the program runs. */
#define SHARE_US 5000000
#define LOOK_NS 5000000

static void reap(struct device *device)
{
	/* The holder reaps first, or is about to settle what the caller waits for. */
	if (pthread_mutex_trylock(&device->mover->lock))
		return;
	ours_enter();
	batch_reap(device);
	ours_leave();
	pthread_mutex_unlock(&device->mover->lock);
}

static CUresult set_up(struct device *device)
{
	struct mover *mover = calloc(1, sizeof(*mover));

	if (!mover)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_init(&mover->lock, NULL);
	mover->batch_bytes = BATCH_FIRST;
	mover->copy_us = COPY_US;
	mover->work_us = WORK_US;
	device->mover = mover;
	device->regions->reap = reap;
	return CUDA_SUCCESS;
}

/* Nothing else moves from here on. What the GPU keeps and no program uses goes first: it is the cheapest to give, and
 * what comes back is charged by itself. Returns the bytes of that; `busy_us` is for `end`. */
static uint64_t begin(struct device *device, uint64_t *busy_us)
{
	uint64_t freed = 0;

	pthread_mutex_lock(&device->mover->lock);
	ours_enter();
	*busy_us = device->mover->busy_us;
	if (device_borrow(device)) {
		freed = pool_trim(device, 0);
		device_return(device);
	}
	return freed;
}

/* Something else may move again. Returns the microseconds that moving took since it was `busy_us`. */
static uint64_t end(struct device *device, uint64_t busy_us)
{
	const uint64_t usec = device->mover->busy_us - busy_us;

	ours_leave();
	pthread_mutex_unlock(&device->mover->lock);
	return usec;
}

/* Out */

static uint64_t bytes_of(const struct pick *picks, size_t count)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < count; i++)
		bytes += chunk_bytes(picks[i].region, picks[i].index);
	return bytes;
}

/* `exchanged`: as much is to come in its place, and the daemon is told before what may be off the GPU meanwhile. */
static uint64_t out(struct device *device, uint64_t bytes, bool exchanged)
{
	struct pick picks[MOST];
	struct batch *batch;
	uint64_t start, going;
	size_t count = pick_out(device, bytes, exchanged ? EXCHANGE_WHOLE_MOST : SIZE_MAX, picks, MOST);

	if (!count)
		return 0;
	going = bytes_of(picks, count) + pool_credited(device);
	if (exchanged && going > __atomic_load_n(&device->away, __ATOMIC_RELAXED)) {
		__atomic_store_n(&device->away, going, __ATOMIC_RELAXED);
		daemon_report(device);
	}
	start = moment_us();
	batch = batch_new_out(device, picks, count);
	if (!batch)
		return 0;
	device->mover->busy_us += moment_us() - start;
	return batch_move(device, batch);
}

uint64_t mover_owed(struct device *device)
{
	return device->pool ? pool_credited(device) : 0;
}

uint64_t mover_booked(struct device *device)
{
	uint64_t moved = device->pool ? pool_spend(device, UINT64_MAX) : 0;

	__atomic_add_fetch(&device->swapped, moved, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&device->resident, moved, __ATOMIC_RELAXED);
	return moved;
}

uint64_t mover_out(struct device *device, uint64_t bytes, uint64_t *usec)
{
	struct mover *mover = device->mover;
	const uint64_t start = moment_us();
	uint64_t resident[CLASSES], freed, moved, step, busy_us;

	*usec = 0;
	if (!mover)
		return 0;
	freed = begin(device, &busy_us);
	object_pin_reachable(device);
	/* What was let back and never came is in the host already. */
	moved = pool_credited(device);
	while (freed + moved < bytes && moment_us() - start < CALL_US && batch_reap(device)) {
		uint64_t rest = bytes - freed - moved;

		step = out(device, rest < mover->batch_bytes ? rest : mover->batch_bytes, false);
		if (!step)
			break;
		moved += step;
	}
	tree_classes(device, resident);
	keeper_expect(device, resident, __atomic_load_n(&device->swapped, __ATOMIC_RELAXED) + bytes);
	*usec = end(device, busy_us);
	return moved;
}

/* In */

/* Moves the picks in, for which `bytes` are in the books already; what does not move becomes credit. */
static uint64_t in(struct device *device, const struct pick *picks, size_t count, uint64_t bytes)
{
	struct batch *batch = batch_new(true, picks, count);

	if (batch)
		return batch_move(device, batch);
	pool_credit(device, bytes);	/* before it is let go: it may be freed at once */
	pick_put(picks, count);
	return 0;
}

/* How many of the picks may come, 0 for none: the others are let go. */
static size_t grant(struct device *device, const struct pick *picks, size_t count)
{
	while (count) {
		uint64_t bytes = bytes_of(picks, count), credit = pool_spend(device, bytes), need = bytes - credit;
		size_t less = count / 2;

		if (!need)
			return count;
		if (!daemon_move_in(device, need)) {
			__atomic_add_fetch(&device->resident, need, __ATOMIC_RELAXED);
			__atomic_sub_fetch(&device->swapped, need, __ATOMIC_RELAXED);
			return count;
		}
		pool_credit(device, credit);
		pick_put(picks + less, count - less);
		count = less;
	}
	return 0;
}

uint64_t mover_in(struct device *device, uint64_t bytes, uint64_t *usec)
{
	struct mover *mover = device->mover;
	const uint64_t start = moment_us();
	struct pick picks[MOST];
	uint64_t moved = 0, step = 1, busy_us;

	*usec = 0;
	if (!mover)
		return 0;
	begin(device, &busy_us);
	while (moved < bytes && step && moment_us() - start < CALL_US && batch_reap(device)) {
		uint64_t rest = bytes - moved;
		size_t count = pick_in(device, rest < mover->batch_bytes ? rest : mover->batch_bytes,
					      picks, MOST);

		count = grant(device, picks, count);
		step = count ? in(device, picks, count, bytes_of(picks, count)) : 0;
		moved += step;
	}
	*usec = end(device, busy_us);
	return moved;
}

uint64_t mover_exchange(struct device *device, uint64_t bytes, uint64_t *usec)
{
	struct mover *mover = device->mover;
	struct pick picks[MOST];
	uint64_t moved = 0, gone, busy_us;
	size_t count;

	pthread_mutex_lock(&mover->lock);
	ours_enter();
	busy_us = mover->busy_us;
	object_pin_reachable(device);
	gone = batch_reap(device) ? out(device, bytes, true) : 0;
	if (gone) {
		count = pick_in(device, gone, picks, MOST);
		count = grant(device, picks, count);
		moved = count ? in(device, picks, count, bytes_of(picks, count)) : 0;
	}
	*usec = end(device, busy_us);
	return moved;
}

/* `charged` bytes may come: they are credit for what of it is still in the host, as it may have come, or gone,
 * meanwhile. */
static void let_come(struct device *device, CUdeviceptr address, size_t bytes, uint64_t charged)
{
	struct pick picks[MOST];
	uint64_t there, credit;
	size_t count;

	pthread_mutex_lock(&device->mover->lock);
	count = pick_range(address, bytes, picks, MOST);
	there = bytes_of(picks, count);
	if (there > charged)
		there = charged;
	credit = pool_spend(device, there);
	__atomic_sub_fetch(&device->swapped, there - credit, __ATOMIC_RELAXED);
	if (there > credit)
		daemon_uncharge(device, 0, there - credit);
	pool_credit(device, there);
	pick_put(picks, count);
	pthread_mutex_unlock(&device->mover->lock);
	pool_uncharge(device, charged - (there - credit));
}

CUresult mover_fetch(struct device *device, CUdeviceptr address, size_t bytes)
{
	struct mover *mover = device->mover;
	struct pick picks[MOST];
	uint64_t need, credit;
	size_t count;

	for (int try = 0; try < TRIES * 100; try++) {
		pthread_mutex_lock(&mover->lock);	/* nothing of it is on its way out then */
		ours_enter();
		batch_reap(device);
		count = pick_range(address, bytes, picks, MOST);
		need = bytes_of(picks, count);
		credit = pool_spend(device, need);
		if (need && credit == need) {
			uint64_t moved = in(device, picks, count, need);

			ours_leave();
			pthread_mutex_unlock(&mover->lock);
			if (!moved)
				return CUDA_ERROR_NOT_READY;
			continue;
		}
		pool_credit(device, credit);
		pick_put(picks, count);
		ours_leave();
		pthread_mutex_unlock(&mover->lock);
		if (!count)
			return CUDA_SUCCESS;
		/* Without the lock: it may be this process that has to give for it. */
		if (daemon_charge(device, need))
			return CUDA_ERROR_OUT_OF_MEMORY;
		__atomic_add_fetch(&device->resident, need, __ATOMIC_RELAXED);
		let_come(device, address, bytes, need);
	}
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The bytes of it that moved; `left`: there is more. */
static uint64_t share_some(struct device *device, CUdeviceptr address, size_t bytes, bool *left)
{
	struct mover *mover = device->mover;
	struct pick picks[SHARED_AT_ONCE];
	struct batch *batch;
	uint64_t moved = 0;
	size_t count = 0;

	pthread_mutex_lock(&mover->lock);
	ours_enter();
	*left = true;
	if (batch_reap(device)) {
		count = pick_shareable(address, bytes, 0, false, picks, SHARED_AT_ONCE);
		*left = count;
	}
	batch = count ? batch_new(true, picks, count) : NULL;
	if (batch) {
		batch->within = true;
		moved = batch_move(device, batch);
	} else {
		pick_put(picks, count);
	}
	ours_leave();
	pthread_mutex_unlock(&mover->lock);
	return moved;
}

CUresult mover_share(struct device *device, CUdeviceptr address, size_t bytes)
{
	const struct timespec moment = { .tv_nsec = LOOK_NS };
	uint64_t until = moment_us() + SHARE_US;
	bool left;

	do
		if (share_some(device, address, bytes, &left))
			until = moment_us() + SHARE_US;
		else if (left)
			nanosleep(&moment, NULL);
	while (left && moment_us() < until);
	return left ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

LIFE(.stage = LIFE_MOVES, .set_up = set_up);
