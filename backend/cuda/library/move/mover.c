// SPDX-License-Identifier: Apache-2.0
#include "mover.h"

#include "batch.h"
#include "chunk.h"
#include "daemon.h"
#include "driver.h"
#include "host.h"
#include "keeper.h"
#include "life.h"
#include "moment.h"
#include "object.h"
#include "order.h"
#include "ours.h"
#include "pick.h"
#include "pool.h"
#include "tree.h"
#include "turn.h"

#include <stdlib.h>
#include <time.h>

/* Bytes that move together at first (batch.c). */
#define BATCH_FIRST (512 * GG_MIB)
/* The same of a program that waits for its turn: no thread of it goes on sooner as its gate opens in between. */
#define BATCH_GAP (2048 * GG_MIB)
/* For how long a copy is waited for: it takes milliseconds, unless the GPU does not run this process at all
 * (frozen). */
#ifndef COPY_US
#define COPY_US 1000000
#endif
/* For how long the gate may be closed for what runs, while none of it ends. */
#define WORK_US 300000
#define TRIES 3
#define MOST BATCH_MOST_CHUNKS
/* Batches that are marked at the end of a turn, at most, the bytes of each, and for how long, us: at 2 TB/s 16 GiB take
 * 9 ms, and the daemon waits for 20 more than it gave to drain (MARK_S of backend/cuda/gates.py). What is not marked by
 * then is copied when it goes. */
#define MARK_BATCHES 32
#define MARK_BYTES (512 * GG_MIB)
#define MARK_US 10000
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
	mover->mark_us = MARK_US;
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

/* Bytes that move together now. */
static uint64_t at_once(const struct device *device)
{
	return turn_gap(device) ? BATCH_GAP : device->mover->batch_bytes;
}

/* Out */

static uint64_t bytes_of(const struct pick *picks, size_t count)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < count; i++)
		bytes += chunk_bytes(picks[i].region, picks[i].index);
	return bytes;
}

/* About `bytes` of the coldest, with the chunks of the host that they go to; NULL: there is none. `exchanged`: as much
 * is to come in its place, and the daemon is told before what may be off the GPU meanwhile. */
static struct batch *ready_out(struct device *device, uint64_t bytes, bool exchanged)
{
	struct pick picks[MOST];
	const size_t count = pick_out(device, bytes, exchanged ? EXCHANGE_WHOLE_MOST : SIZE_MAX, picks, MOST);
	struct batch *batch;
	uint64_t start, going;

	if (!count)
		return NULL;
	going = bytes_of(picks, count) + pool_credited(device);
	if (exchanged && going > __atomic_load_n(&device->away, __ATOMIC_RELAXED)) {
		__atomic_store_n(&device->away, going, __ATOMIC_RELAXED);
		daemon_report(device);
	}
	start = moment_us();
	batch = batch_new_out(device, picks, count);
	if (batch)
		device->mover->busy_us += moment_us() - start;
	return batch;
}

static uint64_t out(struct device *device, uint64_t bytes)
{
	struct batch *batch = ready_out(device, bytes, false);

	return batch ? batch_move(device, batch) : 0;
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
	const uint64_t start = moment_us();
	uint64_t resident[CLASSES], freed, moved, step, busy_us;

	*usec = 0;
	if (!device->mover)
		return 0;
	freed = begin(device, &busy_us);
	object_pin_reachable(device);
	/* What was let back and never came is in the host already. */
	moved = pool_credited(device);
	while (freed + moved < bytes && moment_us() - start < CALL_US && batch_reap(device)) {
		const uint64_t rest = bytes - freed - moved, most = at_once(device);

		step = out(device, rest < most ? rest : most);
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

/* Of what `pick` picks, in its order. */
static uint64_t come(struct device *device, uint64_t bytes,
		     size_t (*pick)(struct device *, size_t, struct pick *, size_t), uint64_t *usec)
{
	const uint64_t start = moment_us();
	struct pick picks[MOST];
	uint64_t moved = 0, step = 1, busy_us;

	*usec = 0;
	if (!device->mover)
		return 0;
	begin(device, &busy_us);
	while (moved < bytes && step && moment_us() - start < CALL_US && batch_reap(device)) {
		const uint64_t rest = bytes - moved, most = at_once(device);
		size_t count = pick(device, rest < most ? rest : most, picks, MOST);

		count = grant(device, picks, count);
		qsort(picks, count, sizeof(*picks), pick_by_address);
		step = count ? in(device, picks, count, bytes_of(picks, count)) : 0;
		moved += step;
	}
	*usec = end(device, busy_us);
	return moved;
}

uint64_t mover_in(struct device *device, uint64_t bytes, uint64_t *usec)
{
	return come(device, bytes, pick_in, usec);
}

uint64_t mover_prepare(struct device *device, uint64_t bytes, uint64_t *usec)
{
	return come(device, bytes, order_next, usec);
}

/* Both ways at once: what comes is granted by what goes. */
static uint64_t exchange(struct device *device, uint64_t bytes)
{
	struct batch *leaves = ready_out(device, bytes, true), *comes = NULL;
	struct pick picks[MOST];
	size_t count;
	uint64_t room = 0;

	for (size_t i = 0; leaves && i < leaves->count; i++)
		room += leaves->bytes[i];
	count = room ? pick_in(device, room, picks, MOST) : 0;
	if (count)
		comes = batch_new(true, picks, count);
	if (comes) {
		comes->instead = true;
		return batch_exchange(device, leaves, comes);
	}
	pick_put(picks, count);
	if (leaves)
		batch_cancel(device, leaves);
	return 0;
}

uint64_t mover_exchange(struct device *device, uint64_t bytes, uint64_t *usec)
{
	struct mover *mover = device->mover;
	uint64_t moved = 0, busy_us;

	pthread_mutex_lock(&mover->lock);
	ours_enter();
	busy_us = mover->busy_us;
	object_pin_reachable(device);
	if (batch_reap(device))
		moved = exchange(device, bytes);
	*usec = end(device, busy_us);
	return moved;
}

/* Marks, of at most `want` bytes, what a batch takes that others have not; the bytes, 0 for no more. Its chunks stay
 * busy. */
static uint64_t mark_some(struct device *device, uint64_t want, struct batch **batch)
{
	struct pick picks[MOST];
	size_t count = pick_next(device, want, picks, MOST);
	uint64_t bytes = bytes_of(picks, count);

	*batch = count ? batch_new(false, picks, count) : NULL;
	if (!*batch) {
		pick_put(picks, count);
		return 0;
	}
	return batch_mark(device, *batch) ? bytes : 0;
}

uint64_t mover_mark(struct device *device, uint64_t bytes)
{
	struct mover *mover = device->mover;
	struct batch *batches[MARK_BATCHES] = { NULL };
	uint64_t marked = 0, some = 1;
	uint64_t until, now, copy_us;

	if (!mover || !turn_gap(device))
		return 0;
	pthread_mutex_lock(&mover->lock);
	copy_us = mover->copy_us;
	now = moment_us();
	until = now + mover->mark_us;
	ours_enter();
	if (batch_reap(device) && device_borrow(device)) {
		some = carry_prepare(device) == CUDA_SUCCESS;
		for (size_t i = 0; i < MARK_BATCHES && some && marked < bytes && (now = moment_us()) < until; i++) {
			const uint64_t rest = bytes - marked;

			mover->copy_us = until - now < copy_us ? until - now : copy_us;
			some = mark_some(device, rest < MARK_BYTES ? rest : MARK_BYTES, &batches[i]);
			marked += some;
		}
		mover->copy_us = copy_us;
		device_return(device);
	}
	for (size_t i = 0; i < MARK_BATCHES && batches[i]; i++) {
		pick_put(batches[i]->pick, batches[i]->count);
		batch_free(batches[i]);
	}
	ours_leave();
	pthread_mutex_unlock(&mover->lock);
	return marked;
}

struct mover_spent mover_spent(struct device *device)
{
	struct mover_spent spent = { 0 };

	if (!device->mover)
		return spent;
	pthread_mutex_lock(&device->mover->lock);
	spent = (struct mover_spent){ device->mover->waited_us, device->mover->closed_us, host_made_us(device) };
	pthread_mutex_unlock(&device->mover->lock);
	return spent;
}

bool mover_rests(struct device *device)
{
	bool rests = true;

	if (device->mover) {
		pthread_mutex_lock(&device->mover->lock);
		ours_enter();
		rests = batch_reap(device);
		ours_leave();
		pthread_mutex_unlock(&device->mover->lock);
	}
	return rests;
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
