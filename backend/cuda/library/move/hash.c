// SPDX-License-Identifier: Apache-2.0
#include "hash.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "driver.h"
#include "glibc.h"
#include "hash_ptx.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "place.h"

/* Bytes per block of threads; a block leaves one sum. */
#define PART_BYTES ((size_t)256 << 10)
#define THREADS 256
#define PARTS_MOST (PLACE_RUN_BYTES / PART_BYTES)
/* Time for which the end is polled without a pause, in microseconds; 64 MiB take 30. */
#define BRIEF_US 200
#define PAUSE_NS 20000

/* The state of each device; with its mover's lock. */
static struct hasher {
	uint64_t made_in;	/* device->contexts when this was made; it goes with the context */
	CUfunction kernel;	/* this and the next: as far as they could be made */
	CUevent event;
	struct mark *sums;	/* in host memory, where the kernel writes them */
	unsigned int failures;	/* in a row */
	unsigned int rest;	/* calls to skip before the next attempt */
} hashers[GG_ORDINALS];

/* Calls skipped after a failure, since it may recur each time, and memory has to move; doubled after each further one,
 * up to the second value. */
#define REST 16
#define REST_MOST 4096

/* The key of this process, kept from all others. */
static uint64_t key[2];

static CUresult load(CUfunction *kernel)
{
	CUresult result;
	CUmodule module;

	result = real.cuModuleLoadData(&module, HASH_PTX);
	return result == CUDA_SUCCESS ? real.cuModuleGetFunction(kernel, module, "ggroup_hash") : result;
}

static bool make(struct hasher *hasher)
{
	void *sums = NULL;

	if (!real.cuModuleLoadData || !real.cuModuleGetFunction || !real.cuLaunchKernel || !real.cuMemHostAlloc)
		return false;
	if (!key[0] && glibc_random(key, sizeof(key), 0) != sizeof(key))
		return false;
	if (!hasher->kernel && load(&hasher->kernel) != CUDA_SUCCESS)
		hasher->kernel = NULL;
	if (!hasher->event && real.cuEventCreate(&hasher->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
		hasher->event = NULL;
	if (!hasher->sums && real.cuMemHostAlloc(&sums, PARTS_MOST * sizeof(*hasher->sums), 0) == CUDA_SUCCESS)
		hasher->sums = sums;
	return hasher->kernel && hasher->event && hasher->sums;
}

static void has_failed(struct hasher *hasher)
{
	hasher->rest = REST << hasher->failures;
	if (hasher->rest < REST_MOST)
		hasher->failures++;
}

bool hash_ready(struct device *device)
{
	struct hasher *hasher = &hashers[device->ordinal];
	const uint64_t start = moment_us();

	if (hasher->made_in != device->contexts)
		*hasher = (struct hasher){ .made_in = device->contexts };
	if (hasher->rest && hasher->rest--)
		return false;
	if (hasher->kernel && hasher->event && hasher->sums)
		return true;
	if (make(hasher)) {
		log_line("device %d: marks can be made, after %llu us", device->ordinal,
			 (unsigned long long)(moment_us() - start));
		return true;
	}
	log_line("device %d: marks cannot be made", device->ordinal);
	has_failed(hasher);
	return false;
}

/* Launches the kernel on consecutive chunks of one size, with sums from `first` on. */
static CUresult launch(const struct hasher *hasher, CUstream stream, CUdeviceptr at, size_t bytes, size_t count,
		       size_t first)
{
	uint64_t vectors = bytes / 16;
	struct mark *sums = hasher->sums + first;
	void *parameters[] = { &at, &vectors, &sums, &key[0], &key[1] };

	return real.cuLaunchKernel(hasher->kernel, (unsigned int)(bytes / PART_BYTES), (unsigned int)count, 1,
				   THREADS, 1, 1, 0, stream, parameters, NULL);
}

static CUresult await(CUevent event, uint64_t wait_us)
{
	const uint64_t start = moment_us();
	CUresult result;

	while ((result = real.cuEventQuery(event)) == CUDA_ERROR_NOT_READY && moment_us() < start + wait_us)
		if (moment_us() > start + BRIEF_US)
			nanosleep(&(struct timespec){ .tv_nsec = PAUSE_NS }, NULL);
	return result;
}

CUresult hash_chunks(struct device *device, const struct hash_order *order, struct mark *marks, bool *unsure)
{
	struct hasher *hasher = &hashers[device->ordinal];
	const CUdeviceptr *at = order->at;
	const size_t *bytes = order->bytes, count = order->count;
	CUresult result = CUDA_SUCCESS;
	size_t parts = 0;
	bool launched = false;

	for (size_t i = 0, many; i < count && result == CUDA_SUCCESS; i += many) {
		many = 1;
		while (i + many < count && bytes[i + many] == bytes[i] && at[i + many] == at[i] + many * bytes[i])
			many++;
		result = launch(hasher, order->stream, at[i], bytes[i], many, parts);
		launched |= result == CUDA_SUCCESS;
		parts += many * (bytes[i] / PART_BYTES);
	}
	if (result == CUDA_SUCCESS)
		result = real.cuEventRecord(hasher->event, order->stream);
	if (result == CUDA_SUCCESS)
		result = await(hasher->event, order->wait_us);
	if (result != CUDA_SUCCESS) {
		*unsure |= launched;
		if (result != CUDA_ERROR_NOT_READY)
			has_failed(hasher);
		log_line("device %d: no marks: error %d", device->ordinal, (int)result);
		return result;
	}
	hasher->failures = 0;
	parts = 0;
	for (size_t i = 0; i < count; i++) {
		unsigned __int128 sum = 0;

		for (size_t k = 0; k < bytes[i] / PART_BYTES; k++, parts++)
			sum += (unsigned __int128)hasher->sums[parts].high << 64 | hasher->sums[parts].low;
		marks[i] = (struct mark){ (uint64_t)sum, (uint64_t)(sum >> 64) };
	}
	return CUDA_SUCCESS;
}

static void forget(void)
{
	memset(hashers, 0, sizeof(hashers));
}

LIFE(.stage = LIFE_MOVES, .forget = forget);
