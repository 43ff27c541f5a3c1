// SPDX-License-Identifier: Apache-2.0
/*
 * The thread that allocates host chunks ahead, as many as the program is expected to need, and frees GPU memory that
 * was kept unused for a while.
 */

#include "daemon.h"
#include "device.h"
#include "host.h"
#include "kept.h"
#include "life.h"
#include "moment.h"
#include "ours.h"
#include "pool.h"
#include "keeper.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* Most host memory that is allocated ahead before any was asked for. It is also limited to what it takes to halve the
 * program with its context (5/8 of its resident bytes), and to the daemon's grant; without a daemon that grants, to an
 * eighth of the host's available memory. */
#define AHEAD_BYTES (8192 * GG_MIB)

/* The class that needs one more host chunk; CLASSES: none. With the pool's lock held. */
static enum chunk_class wanted(const struct pool *pool)
{
	enum chunk_class class;

	for (class = pool->halted ? CLASSES : 0; class < CLASSES; class++) {
		uint64_t there = pool->host_bytes[class] + pool->used[class];

		if (there + class_bytes[class] <= pool->goal[class] && kept_may(pool, class_bytes[class]))
			break;
	}
	return class;
}

/* Allocates one host chunk if one is wanted; false: none is. */
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
	else	/* the host is short: want no more for now */
		pool->goal[class] = pool->host_bytes[class] + pool->used[class];
	pool->making = false;
	host_count(device);
	pthread_cond_broadcast(&pool->wake);
	pthread_mutex_unlock(&pool->lock);
	return true;
}

/* Frees one chunk above what may be kept; false: there is none. */
static bool shed(struct device *device)
{
	struct pool *pool = device->pool;
	bool any = false, over;

	pthread_mutex_lock(&pool->lock);
	over = !kept_may(pool, 0) || (!pool->granted && kept_sum(pool->clean));
	pthread_mutex_unlock(&pool->lock);
	if (over && device_borrow(device)) {
		any = pool->shed_copy(device) || host_shed(device);
		device_return(device);
	}
	return any;
}

static void *look_after(void *argument)
{
	struct device *device = argument;
	struct pool *pool = device->pool;
	struct timespec until;
	uint64_t due;

	ours_enter();	/* for good: all calls of this thread are the library's own */
	for (;;) {
		if (shed(device) || grow(device))
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

/* Sets the goals from the last demand, limited to `most` bytes, including those in use. With the pool's lock held;
 * true: they have grown. */
static bool set_goals(struct pool *pool, uint64_t most)
{
	const uint64_t total = kept_sum(pool->resident), want = pool->wanted < most ? pool->wanted : most;
	bool grown = false;

	for (int class = 0; class < CLASSES && total; class++) {
		double part = (double)pool->resident[class] / (double)total;
		uint64_t goal = (uint64_t)((double)want * part);

		goal -= goal % class_bytes[class];
		if (goal > pool->goal[class]) {
			pool->goal[class] = goal;
			grown = true;
		}
	}
	return grown;
}

void keeper_expect(struct device *device, const uint64_t resident[CLASSES], uint64_t soon)
{
	struct pool *pool = device->pool;
	const uint64_t total = kept_sum(resident);
	uint64_t want, most;
	bool granted;

	want = total / 8 * 5 < AHEAD_BYTES ? total / 8 * 5 : AHEAD_BYTES;
	if (pool->limit != UINT64_MAX)
		want = total < pool->limit ? total : pool->limit;
	if (soon > want)
		want = soon < total ? soon : total;
	if (want > pool->limit)
		want = pool->limit;
	pthread_mutex_lock(&pool->lock);
	granted = pool->granted;
	const uint64_t have = granted ? pool->wanted : kept_sum(pool->goal);

	pthread_mutex_unlock(&pool->lock);
	if (!total || want <= have + have / 4)	/* in steps, since this is called for every allocation */
		return;
	most = granted || pool->limit < UINT64_MAX ? pool->limit : available() / 8;
	pthread_mutex_lock(&pool->lock);
	pool->wanted = want > pool->wanted ? want : pool->wanted;
	memcpy(pool->resident, resident, sizeof(pool->resident));
	if (set_goals(pool, pool->granted ? pool->grant : most))
		kept_wake(device);
	host_count(device);
	pthread_mutex_unlock(&pool->lock);
	if (granted)	/* ask it for more */
		daemon_report(device);
}

void keeper_grant(struct device *device, uint64_t bytes)
{
	struct pool *pool = device->pool;

	pthread_mutex_lock(&pool->lock);
	pool->granted = bytes != UINT64_MAX;
	pool->grant = bytes;
	if (pool->granted) {
		memset(pool->goal, 0, sizeof(pool->goal));
		set_goals(pool, bytes);
	}
	if (pool->granted || kept_sum(pool->clean))
		kept_wake(device);
	pthread_mutex_unlock(&pool->lock);
}

static CUresult set_up(struct device *device)
{
	device->pool->look_after = look_after;
	return CUDA_SUCCESS;
}

LIFE(.stage = LIFE_KEEPER, .set_up = set_up);
