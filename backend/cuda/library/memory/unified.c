// SPDX-License-Identifier: Apache-2.0
#include "unified.h"

#include <stdlib.h>
#include <string.h>

#include "daemon.h"
#include "driver.h"
#include "hint.h"
#include "life.h"
#include "log.h"
#include "pool.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t rested = PTHREAD_COND_INITIALIZER;
static struct unified **all;	/* by address */
static size_t all_count, all_room;
static unsigned int known;	/* their number; atomic */

/* Return the number of the first allocation that begins behind an address. With the lock. */
static size_t behind(CUdeviceptr address)
{
	size_t low = 0, high = all_count;

	while (low < high) {
		const size_t middle = (low + high) / 2;

		if (all[middle]->start <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Return the allocation that has an address; NULL: none. With the lock. */
static struct unified *at(CUdeviceptr address)
{
	const size_t next = behind(address);
	struct unified *unified = next ? all[next - 1] : NULL;

	return unified && address < unified->shadow.end ? unified : NULL;
}

/* Wait until no thread has the allocation of an address to itself. With the lock; it may have gone meanwhile. */
static struct unified *resting(CUdeviceptr address)
{
	struct unified *unified;

	while ((unified = at(address)) && unified->busy)
		pthread_cond_wait(&rested, &lock);
	return unified;
}

static void rest(struct unified *unified)
{
	unified->busy = false;
	pthread_cond_broadcast(&rested);
}

void unified_disown(struct unified *unified)
{
	pthread_mutex_lock(&lock);
	rest(unified);
	pthread_mutex_unlock(&lock);
}

bool unified_any(void)
{
	return __atomic_load_n(&known, __ATOMIC_ACQUIRE);
}

/* Made, and freed */

bool unified_charge(struct device *device, uint64_t bytes)
{
	if (daemon_charge(device, bytes))
		return false;
	__atomic_add_fetch(&device->resident, bytes, __ATOMIC_RELAXED);
	__atomic_add_fetch(&device->managed, bytes, __ATOMIC_RELAXED);
	return true;
}

static bool add(struct unified *unified)
{
	struct unified **more;
	size_t place;

	pthread_mutex_lock(&lock);
	if (all_count == all_room) {
		more = realloc(all, (all_room * 2 + 16) * sizeof(*more));
		if (!more) {
			pthread_mutex_unlock(&lock);
			return false;
		}
		all = more;
		all_room = all_room * 2 + 16;
	}
	place = behind(unified->start);
	memmove(&all[place + 1], &all[place], (all_count - place) * sizeof(*all));
	all[place] = unified;
	__atomic_store_n(&known, ++all_count, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return true;
}

static void drop(struct unified *unified)
{
	shadow_end(&unified->shadow);
	free(unified);
}

/* Charge each piece by itself: for one that there is no room for, those before it may go. */
static void charge_pieces(struct unified *unified)
{
	CUresult result;

	for (size_t i = 0; i < unified->count; i++) {
		const bool charged = unified_charge(unified->device, unified_piece_charge(unified, i));

		pthread_mutex_lock(&lock);
		while (unified->busy)	/* others of it go meanwhile */
			pthread_cond_wait(&rested, &lock);
		unified->busy = !charged;
		if (charged)
			unified->place[i] = UNIFIED_ON_GPU;
		pthread_mutex_unlock(&lock);
		if (charged)
			continue;
		result = hint_keep(&unified->shadow, unified_piece(unified, i), unified_piece_bytes(unified, i),
				   unified->device);
		unified_disown(unified);
		if (result)
			log_line("managed memory: no advice is taken, error %d: it is not limited", (int)result);
	}
}

static bool takes_advice(const struct device *device)
{
	int value = 0;

	return real.cuDeviceGetAttribute &&
	       !real.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, device->ordinal) &&
	       value;
}

bool unified_made(struct device *device, CUdeviceptr address, uint64_t bytes, CUcontext context)
{
	const size_t count = (bytes + UNIFIED_PIECE - 1) / UNIFIED_PIECE;
	CUstreamCaptureMode mode;
	struct unified *unified;
	bool whole, made;

	if (!device || !device->pool || bytes < GG_CHUNK || !daemon_knows_managed(device))
		return false;
	mode = driver_enter();
	made = takes_advice(device);
	unified = made ? calloc(1, sizeof(*unified) + count) : NULL;
	if (unified) {
		*unified = (struct unified){
			.device = device, .context = context, .start = address, .bytes = bytes, .busy = true,
			.count = count,
		};
		memset(unified->place, UNIFIED_REFUSED, count);
	}
	made = unified && shadow_begin(&unified->shadow, address, bytes) && add(unified);
	if (made) {
		whole = unified_charge(device, (bytes + GG_CHUNK - 1) / GG_CHUNK * GG_CHUNK);
		if (whole)
			memset(unified->place, UNIFIED_ON_GPU, count);
		pthread_mutex_lock(&lock);
		rest(unified);	/* what has come by now may go */
		unified->touched = !whole;
		pthread_mutex_unlock(&lock);
		if (!whole)
			charge_pieces(unified);
		daemon_report(device);
	} else if (unified) {
		drop(unified);
	}
	driver_leave(mode);
	return made;
}

struct unified *unified_take(CUdeviceptr address)
{
	struct unified *unified;
	size_t place;

	if (!unified_any())
		return NULL;
	pthread_mutex_lock(&lock);
	unified = resting(address);
	if (unified && unified->start == address) {
		place = behind(address) - 1;
		memmove(&all[place], &all[place + 1], (all_count - place - 1) * sizeof(*all));
		__atomic_store_n(&known, --all_count, __ATOMIC_RELEASE);
	} else {
		unified = NULL;
	}
	pthread_mutex_unlock(&lock);
	return unified;
}

void unified_taken(struct unified *taken, bool freed)
{
	uint64_t here = 0, there = 0;

	if (!taken)
		return;
	if (!freed) {
		if (!add(taken))
			drop(taken);	/* it stays charged until the process ends */
		return;
	}
	for (size_t i = 0; i < taken->count; i++) {
		here += taken->place[i] == UNIFIED_ON_GPU ? unified_piece_charge(taken, i) : 0;
		there += taken->place[i] == UNIFIED_IN_HOST ? unified_piece_charge(taken, i) : 0;
	}
	__atomic_sub_fetch(&taken->device->managed, here, __ATOMIC_RELAXED);
	pool_uncharge(taken->device, here);
	pool_uncharge_swapped(taken->device, there);
	daemon_report(taken->device);
	drop(taken);
}

static void context_gone(struct device *device, CUcontext context)
{
	CUdeviceptr found;

	(void)device;
	do {
		found = 0;
		pthread_mutex_lock(&lock);
		for (size_t i = 0; i < all_count && !found; i++)
			if (all[i]->context == context)
				found = all[i]->start;
		pthread_mutex_unlock(&lock);
		if (found)
			unified_taken(unified_take(found), true);
	} while (found);
}

bool unified_touched(CUdeviceptr address, uint64_t bytes)
{
	const struct unified *unified;
	bool touched;

	if (!bytes || !unified_any())
		return false;
	pthread_mutex_lock(&lock);
	unified = at(address);
	touched = unified && unified->touched;
	pthread_mutex_unlock(&lock);
	return touched;
}

/* For piece.c and advised.c */

struct unified *unified_own(CUdeviceptr *address, CUdeviceptr *end)
{
	struct unified *unified;

	if (!unified_any())
		return NULL;
	pthread_mutex_lock(&lock);
	unified = resting(*address);
	if (unified && unified->touched && *end <= unified->shadow.end &&
	    shadow_within(&unified->shadow, address, end))
		unified->busy = true;
	else
		unified = NULL;
	pthread_mutex_unlock(&lock);
	return unified;
}

struct unified *unified_own_next(const struct device *device, CUdeviceptr address, enum unified_place place)
{
	struct unified *found = NULL;

	pthread_mutex_lock(&lock);
	for (size_t i = behind(address); i < all_count && !found; i++)
		if (all[i]->device == device && !all[i]->busy && memchr(all[i]->place, place, all[i]->count))
			found = all[i];
	if (found)
		found->busy = true;
	pthread_mutex_unlock(&lock);
	return found;
}

void unified_touch(struct unified *unified)
{
	pthread_mutex_lock(&lock);
	unified->touched = true;
	pthread_mutex_unlock(&lock);
}

void unified_visit(CUdeviceptr address, void (*visit)(struct unified *, void *), void *argument)
{
	struct unified *unified;

	if (!unified_any())
		return;
	pthread_mutex_lock(&lock);
	unified = resting(address);
	if (unified)
		visit(unified, argument);
	pthread_mutex_unlock(&lock);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	rested = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	all = NULL;
	all_count = all_room = 0;
	known = 0;
}

LIFE(.stage = LIFE_FOREIGN, .context_gone = context_gone, .forget = forget);
