// SPDX-License-Identifier: Apache-2.0
/*
 * The thread that makes chunks of the host ahead, as many as the program is expected to need, and
 * lets go of what the GPU has kept without a use for a while.
 */

#include "device.h"
#include "host.h"
#include "kept.h"
#include "life.h"
#include "moment.h"
#include "ours.h"
#include "pool.h"
#include "keeper.h"

#include <stdio.h>
#include <time.h>

/* What is made ahead in the host before anything was asked for: at most this, what it takes to
 * halve the program with its context (5/8 of what is resident), and an eighth of the memory the
 * host has available. */
#define AHEAD_BYTES (8192 * GG_MIB)

/* The class of which the host is to have one more; CLASSES: none. With the lock. */
static enum chunk_class wanted(const struct pool *pool)
{
	enum chunk_class class;

	for (class = pool->halted ? CLASSES : 0; class < CLASSES; class++) {
		uint64_t there = pool->host_bytes[class] + pool->used[class];

		if (there + class_bytes[class] <= pool->goal[class])
			break;
	}
	return class;
}

/* Makes one chunk of the host, if one is wanted; false: none is. */
static bool grow(struct device *device)
{
	struct pool *pool = device->pool;
	enum chunk_class class;
	struct spare spare;
	CUresult result = CUDA_ERROR_UNKNOWN;

	pthread_mutex_lock(&pool->lock);
	class = wanted(pool);
	pool->making = class != CLASSES;
	pthread_mutex_unlock(&pool->lock);
	if (class == CLASSES)
		return false;
	if (device_borrow(device)) {
		result = host_make(device, class, &spare);
		device_return(device);
	}
	pthread_mutex_lock(&pool->lock);
	if (result == CUDA_SUCCESS && kept_put(&pool->host[class], spare))
		pool->host_bytes[class] += class_bytes[class];
	else	/* no more for now than there is */
		pool->goal[class] = pool->host_bytes[class] + pool->used[class];
	pool->making = false;
	pthread_cond_broadcast(&pool->wake);
	pthread_mutex_unlock(&pool->lock);
	return true;
}

static void *look_after(void *argument)
{
	struct device *device = argument;
	struct pool *pool = device->pool;
	struct timespec until;
	uint64_t due;

	ours_enter();	/* for good: all that this thread does is ours */
	for (;;) {
		if (grow(device))
			continue;
		if (pool_kept(device) && device_borrow(device)) {
			pool_trim_since(device, 0, moment_us() / 1000 - KEPT_MS);
			device_return(device);
		}
		pthread_mutex_lock(&pool->lock);
		if (wanted(pool) != CLASSES) {
			;	/* meanwhile */
		} else if (pool->gpu_bytes) {
			due = moment_us() / 1000 + KEPT_MS / 2;
			until.tv_sec = (time_t)(due / 1000);
			until.tv_nsec = (long)(due % 1000) * 1000000;
			pthread_cond_timedwait(&pool->wake, &pool->lock, &until);
		} else {
			pthread_cond_wait(&pool->wake, &pool->lock);
		}
		pthread_mutex_unlock(&pool->lock);
	}
	return NULL;
}

/* MemAvailable, in bytes; 0: unknown. */
static uint64_t available(void)
{
	FILE *file = fopen("/proc/meminfo", "re");
	unsigned long long kib = 0;
	char line[128];

	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
			break;
	if (file)
		fclose(file);
	return kib * 1024;
}

void keeper_expect(struct device *device, const uint64_t resident[CLASSES], uint64_t soon)
{
	struct pool *pool = device->pool;
	uint64_t total = 0, want, have = 0, most;
	bool grown = false;

	for (int class = 0; class < CLASSES; class++)
		total += resident[class];
	want = total / 8 * 5 < AHEAD_BYTES ? total / 8 * 5 : AHEAD_BYTES;
	if (pool->limit != UINT64_MAX)
		want = total < pool->limit ? total : pool->limit;
	if (soon > want)
		want = soon < total ? soon : total;
	pthread_mutex_lock(&pool->lock);
	for (int class = 0; class < CLASSES; class++)
		have += pool->goal[class];
	pthread_mutex_unlock(&pool->lock);
	if (!total || want <= have + have / 4)	/* in steps: this is called for every allocation */
		return;
	most = pool->limit < UINT64_MAX ? pool->limit : available() / 8;
	if (want > most)
		want = most;
	pthread_mutex_lock(&pool->lock);
	for (int class = 0; class < CLASSES; class++) {
		double part = (double)resident[class] / (double)total;
		uint64_t goal = (uint64_t)((double)want * part);

		goal -= goal % class_bytes[class];
		if (goal > pool->goal[class]) {
			pool->goal[class] = goal;
			grown = true;
		}
	}
	if (grown)
		kept_wake(device);
	pthread_mutex_unlock(&pool->lock);
}

static CUresult set_up(struct device *device)
{
	device->pool->look_after = look_after;
	return CUDA_SUCCESS;
}

LIFE(.stage = LIFE_KEEPER, .set_up = set_up);
