// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include "daemon.h"
#include "driver.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

const uint64_t class_bytes[CLASSES] = { 64 * GG_MIB, 16 * GG_MIB, 2 * GG_MIB };

/* What the GPU keeps for nobody: at most the larger of these, for at most that long. */
#define KEEP_BYTES (64 * GG_MIB)
#define KEEP_PART 50		/* 2 % */
#define KEEP_MS 1000
/* What is made ahead in the host before anything was asked for: at most this, what it takes to halve the program with its
 * context (5/8 of what is resident), and an eighth of the memory the host has available. */
#define AHEAD_BYTES (8192 * GG_MIB)
/* A release that fails is tried again: it has no other way to fail than for a moment, but a broken context. */
#define TRIES 3

struct kept {
	struct kept *next;
	struct spare spare;
	uint64_t since;		/* ms */
};

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t wake;
	bool thread;		/* there is one */
	struct kept *gpu[CLASSES];
	struct kept *host[CLASSES];
	uint64_t gpu_bytes;
	uint64_t host_bytes[CLASSES];
	uint64_t goal[CLASSES];	/* bytes to have ready in the host, or in use there */
	uint64_t used[CLASSES];	/* bytes of the host that serve the program */
	uint64_t peak[CLASSES];	/* the most of that */
	uint64_t credit;
	uint64_t limit;		/* the most to make ahead, or UINT64_MAX */
};

CUresult pool_setup(struct device *device)
{
	struct pool *pool = calloc(1, sizeof(*pool));
	const char *limit = getenv("GGROUP_CUDA_POOL");
	pthread_condattr_t clock;

	if (!pool)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_init(&pool->lock, NULL);
	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(&pool->wake, &clock);
	pthread_condattr_destroy(&clock);
	pool->limit = limit ? strtoull(limit, NULL, 0) * GG_MIB : UINT64_MAX;
	device->pool = pool;
	return CUDA_SUCCESS;
}

/* The books */

void pool_uncharge(struct device *device, uint64_t bytes)
{
	if (!bytes)
		return;
	__atomic_sub_fetch(&device->resident, bytes, __ATOMIC_RELAXED);
	daemon_uncharge(device, bytes, 0);
}

void pool_credit(struct device *device, uint64_t bytes)
{
	pthread_mutex_lock(&device->pool->lock);
	device->pool->credit += bytes;
	pthread_mutex_unlock(&device->pool->lock);
}

uint64_t pool_spend(struct device *device, uint64_t bytes)
{
	struct pool *pool = device->pool;

	pthread_mutex_lock(&pool->lock);
	if (bytes > pool->credit)
		bytes = pool->credit;
	pool->credit -= bytes;
	pthread_mutex_unlock(&pool->lock);
	return bytes;
}

uint64_t pool_credited(struct device *device)
{
	pthread_mutex_lock(&device->pool->lock);
	uint64_t credit = device->pool->credit;
	pthread_mutex_unlock(&device->pool->lock);
	return credit;
}

void pool_uncharge_swapped(struct device *device, uint64_t bytes)
{
	/* What the daemon let back and did not come is in the books as resident. */
	uint64_t resident = pool_spend(device, bytes);

	if (!bytes)
		return;
	__atomic_sub_fetch(&device->resident, resident, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&device->swapped, bytes - resident, __ATOMIC_RELAXED);
	daemon_uncharge(device, resident, bytes - resident);
}

/* The GPU */

static bool take(struct kept **list, struct spare *spare)
{
	struct kept *kept = *list;

	if (!kept)
		return false;
	*list = kept->next;
	*spare = kept->spare;
	free(kept);
	return true;
}

static bool keep(struct kept **list, struct spare spare)
{
	struct kept *kept = malloc(sizeof(*kept));

	if (!kept)
		return false;
	*kept = (struct kept){ .next = *list, .spare = spare, .since = state_now_us() / 1000 };
	*list = kept;
	return true;
}

static CUresult create(CUmemLocationType type, int id, uint64_t bytes, CUmemGenericAllocationHandle *memory)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.location = { .type = type, .id = id },
	};
	CUresult result;

	CALL_REAL(result, cuMemCreate, (memory, bytes, &prop, 0));
	return result;
}

bool pool_cached(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle *memory)
{
	struct pool *pool = device->pool;
	struct spare spare;
	bool found;

	pthread_mutex_lock(&pool->lock);
	found = take(&pool->gpu[class], &spare);
	if (found)
		pool->gpu_bytes -= class_bytes[class];
	pthread_mutex_unlock(&pool->lock);
	if (found)
		*memory = spare.memory;
	return found;
}

CUresult pool_create(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle *memory)
{
	CUresult result = create(CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal, class_bytes[class], memory);

	/* What is kept of other sizes is in the way. */
	if (result == CUDA_ERROR_OUT_OF_MEMORY && pool_trim(device, 0))
		result = create(CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal, class_bytes[class], memory);
	return result;
}

void pool_release(struct device *device, CUmemGenericAllocationHandle memory)
{
	CUresult result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemRelease, (memory));
	if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
		state_log("device %d: cuMemRelease failed with %d", device->ordinal, result);
}

static void *look_after(void *argument);

/* The thread, once there is something for it to do. With the lock. */
static void wake(struct device *device)
{
	struct pool *pool = device->pool;
	sigset_t all, before;
	pthread_attr_t attributes;
	pthread_t thread;

	if (!pool->thread) {
		sigfillset(&all);	/* the program's signals are for its own threads */
		pthread_sigmask(SIG_SETMASK, &all, &before);
		pthread_attr_init(&attributes);
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		pool->thread = !pthread_create(&thread, &attributes, look_after, device);
		pthread_attr_destroy(&attributes);
		pthread_sigmask(SIG_SETMASK, &before, NULL);
	}
	pthread_cond_signal(&pool->wake);
}

void pool_give(struct device *device, enum chunk_class class, CUmemGenericAllocationHandle memory)
{
	struct pool *pool = device->pool;
	uint64_t resident = __atomic_load_n(&device->resident, __ATOMIC_RELAXED);
	uint64_t most = resident / KEEP_PART > KEEP_BYTES ? resident / KEEP_PART : KEEP_BYTES;
	bool kept = false;

	/* While something of this program had to go to the host, what it frees is for that. */
	if (!__atomic_load_n(&device->swapped, __ATOMIC_RELAXED)) {
		pthread_mutex_lock(&pool->lock);
		if (pool->gpu_bytes + class_bytes[class] <= most)
			kept = keep(&pool->gpu[class], (struct spare){ .memory = memory });
		if (kept) {
			if (!pool->gpu_bytes)
				wake(device);
			pool->gpu_bytes += class_bytes[class];
		}
		pthread_mutex_unlock(&pool->lock);
	}
	if (kept)
		return;
	pool_release(device, memory);
	pool_uncharge(device, class_bytes[class]);
}

/* One that has been kept since `before` (ms) or earlier: the oldest of each list are at its end. With the lock. */
static struct kept *oldest(struct pool *pool, uint64_t before, enum chunk_class *class)
{
	for (*class = 0; *class < CLASSES; (*class)++) {
		struct kept **at = &pool->gpu[*class];

		while (*at && (*at)->next)
			at = &(*at)->next;
		if (*at && (*at)->since <= before) {
			struct kept *kept = *at;

			*at = NULL;
			pool->gpu_bytes -= class_bytes[*class];
			return kept;
		}
	}
	return NULL;
}

static uint64_t trim(struct device *device, uint64_t keep_bytes, uint64_t before)
{
	struct pool *pool = device->pool;
	uint64_t freed = 0;

	for (;;) {
		enum chunk_class class;
		struct kept *kept;

		pthread_mutex_lock(&pool->lock);
		kept = pool->gpu_bytes > keep_bytes ? oldest(pool, before, &class) : NULL;
		pthread_mutex_unlock(&pool->lock);
		if (!kept)
			break;
		pool_release(device, kept->spare.memory);
		freed += class_bytes[class];
		free(kept);
	}
	pool_uncharge(device, freed);
	return freed;
}

uint64_t pool_trim(struct device *device, uint64_t keep_bytes)
{
	return trim(device, keep_bytes, UINT64_MAX);
}

uint64_t pool_kept(struct device *device)
{
	pthread_mutex_lock(&device->pool->lock);
	uint64_t bytes = device->pool->gpu_bytes;
	pthread_mutex_unlock(&device->pool->lock);
	return bytes;
}

/* The host */

static void host_destroy(struct device *device, enum chunk_class class, struct spare spare)
{
	CUresult unmapped = CUDA_ERROR_UNKNOWN, result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < TRIES && unmapped != CUDA_SUCCESS; try++)
		CALL_REAL(unmapped, cuMemUnmap, (spare.window, class_bytes[class]));
	for (int try = 0; try < TRIES && result != CUDA_SUCCESS && unmapped == CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemAddressFree, (spare.window, class_bytes[class]));
	pool_release(device, spare.memory);
}

/* A new one, mapped at its window. */
static CUresult host_create(struct device *device, enum chunk_class class, struct spare *spare)
{
	const uint64_t bytes = class_bytes[class];
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult result, ignored;

	result = create(CU_MEM_LOCATION_TYPE_HOST_NUMA, device->host_node, bytes, &spare->memory);
	if (result != CUDA_SUCCESS)
		return result;
	CALL_REAL(result, cuMemAddressReserve, (&spare->window, bytes, 0, 0, 0));
	if (result != CUDA_SUCCESS)
		goto release;
	CALL_REAL(result, cuMemMap, (spare->window, bytes, 0, spare->memory, 0));
	if (result != CUDA_SUCCESS)
		goto free;
	CALL_REAL(result, cuMemSetAccess, (spare->window, bytes, &access, 1));
	if (result == CUDA_SUCCESS)
		return CUDA_SUCCESS;
	host_destroy(device, class, *spare);
	return result;
free:
	CALL_REAL(ignored, cuMemAddressFree, (spare->window, bytes));
	(void)ignored;
release:
	pool_release(device, spare->memory);
	return result;
}

CUresult pool_host(struct device *device, enum chunk_class class, struct spare *spare)
{
	struct pool *pool = device->pool;
	CUresult result = CUDA_SUCCESS;
	bool found;

	pthread_mutex_lock(&pool->lock);
	found = take(&pool->host[class], spare);
	if (found)
		pool->host_bytes[class] -= class_bytes[class];
	pthread_mutex_unlock(&pool->lock);
	if (!found)
		result = host_create(device, class, spare);
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&pool->lock);
	pool->used[class] += class_bytes[class];
	if (pool->used[class] > pool->peak[class])
		pool->peak[class] = pool->used[class];
	pthread_mutex_unlock(&pool->lock);
	return CUDA_SUCCESS;
}

void pool_host_give(struct device *device, enum chunk_class class, struct spare spare)
{
	struct pool *pool = device->pool;
	bool kept = false;

	pthread_mutex_lock(&pool->lock);
	pool->used[class] -= class_bytes[class];
	/* As much as was needed at once before may be again. */
	uint64_t most = pool->peak[class] > pool->goal[class] ? pool->peak[class] : pool->goal[class];

	if (pool->host_bytes[class] + pool->used[class] + class_bytes[class] <= most)
		kept = keep(&pool->host[class], spare);
	if (kept)
		pool->host_bytes[class] += class_bytes[class];
	pthread_mutex_unlock(&pool->lock);
	if (!kept)
		host_destroy(device, class, spare);
}

uint64_t pool_host_kept(struct device *device)
{
	uint64_t bytes = 0;

	pthread_mutex_lock(&device->pool->lock);
	for (int class = 0; class < CLASSES; class++)
		bytes += device->pool->host_bytes[class];
	pthread_mutex_unlock(&device->pool->lock);
	return bytes;
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

void pool_expect(struct device *device, const uint64_t resident[CLASSES], uint64_t soon)
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
		uint64_t goal = (uint64_t)((double)want * ((double)resident[class] / (double)total));

		goal -= goal % class_bytes[class];
		if (goal > pool->goal[class]) {
			pool->goal[class] = goal;
			grown = true;
		}
	}
	if (grown)
		wake(device);
	pthread_mutex_unlock(&pool->lock);
}

/* The thread */

/* The class of which the host is to have one more; CLASSES: none. With the lock. */
static enum chunk_class wanted(const struct pool *pool)
{
	enum chunk_class class;

	for (class = 0; class < CLASSES; class++)
		if (pool->host_bytes[class] + pool->used[class] + class_bytes[class] <= pool->goal[class])
			break;
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
	pthread_mutex_unlock(&pool->lock);
	if (class == CLASSES)
		return false;
	if (state_borrow(device)) {
		result = host_create(device, class, &spare);
		state_return(device);
	}
	pthread_mutex_lock(&pool->lock);
	if (result == CUDA_SUCCESS && keep(&pool->host[class], spare))
		pool->host_bytes[class] += class_bytes[class];
	else	/* no more for now than there is */
		pool->goal[class] = pool->host_bytes[class] + pool->used[class];
	pthread_mutex_unlock(&pool->lock);
	return true;
}

static void *look_after(void *argument)
{
	struct device *device = argument;
	struct pool *pool = device->pool;
	struct timespec until;
	uint64_t due;

	state_enter();	/* for good: all that this thread does is ours */
	for (;;) {
		if (grow(device))
			continue;
		if (pool_kept(device) && state_borrow(device)) {
			trim(device, 0, state_now_us() / 1000 - KEEP_MS);
			state_return(device);
		}
		pthread_mutex_lock(&pool->lock);
		if (wanted(pool) != CLASSES) {
			;	/* meanwhile */
		} else if (pool->gpu_bytes) {
			due = state_now_us() / 1000 + KEEP_MS / 2;
			until = (struct timespec){ .tv_sec = (time_t)(due / 1000), .tv_nsec = (long)(due % 1000) * 1000000 };
			pthread_cond_timedwait(&pool->wake, &pool->lock, &until);
		} else {
			pthread_cond_wait(&pool->wake, &pool->lock);
		}
		pthread_mutex_unlock(&pool->lock);
	}
	return NULL;
}
