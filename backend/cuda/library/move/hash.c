// SPDX-License-Identifier: Apache-2.0
#include "hash.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "driver.h"
#include "hash_ptx.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "place.h"

/* Bytes that a block of threads takes: it leaves one sum. */
#define PART_BYTES ((size_t)256 << 10)
#define THREADS 256
#define PARTS_MOST (PLACE_RUN_BYTES / PART_BYTES)
/* For so long, us, the end of it is looked for without a pause: 64 MiB take 30. */
#define BRIEF_US 200
#define PAUSE_NS 20000

/* Of each device; with its mover's lock. */
static struct hasher {
	uint64_t made_in;	/* device->contexts when this was made; with the context it goes */
	bool fails;
	CUfunction kernel;
	CUevent event;
	struct mark *sums;	/* in the host, where the kernel writes them */
} hashers[GG_ORDINALS];

/* Of this process, and told to no other. */
static uint64_t key[2];

static bool make(struct hasher *hasher)
{
	CUmodule module;
	void *sums = NULL;

	if (!real.cuModuleLoadData || !real.cuModuleGetFunction || !real.cuLaunchKernel || !real.cuMemHostAlloc)
		return false;
	if (!key[0] && getrandom(key, sizeof(key), 0) != sizeof(key))
		return false;
	if (real.cuModuleLoadData(&module, HASH_PTX) != CUDA_SUCCESS ||
	    real.cuModuleGetFunction(&hasher->kernel, module, "ggroup_hash") != CUDA_SUCCESS ||
	    real.cuEventCreate(&hasher->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS ||
	    real.cuMemHostAlloc(&sums, PARTS_MOST * sizeof(*hasher->sums), 0) != CUDA_SUCCESS)
		return false;
	hasher->sums = sums;
	return true;
}

bool hash_ready(struct device *device)
{
	struct hasher *hasher = &hashers[device->ordinal];

	if (hasher->made_in != device->contexts) {
		const uint64_t start = moment_us();

		*hasher = (struct hasher){ .made_in = device->contexts };
		hasher->fails = !make(hasher);
		log_line("device %d: marks %s made: %llu us", device->ordinal, hasher->fails ? "cannot be" : "can be",
			 (unsigned long long)(moment_us() - start));
	}
	return !hasher->fails;
}

/* Submits neighbours of one size, whose sums come to [first, ...) of all. */
static CUresult launch(const struct hasher *hasher, CUstream stream, CUdeviceptr at, size_t bytes, size_t count, size_t first)
{
	uint64_t vectors = bytes / 16;
	struct mark *sums = hasher->sums + first;
	void *parameters[] = { &at, &vectors, &sums, &key[0], &key[1] };

	return real.cuLaunchKernel(hasher->kernel, (unsigned int)(bytes / PART_BYTES), (unsigned int)count, 1, THREADS, 1, 1, 0,
				   stream, parameters, NULL);
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
		/* What fails once may fail each time, and memory has to move. */
		hasher->fails = result != CUDA_ERROR_NOT_READY;
		log_line("device %d: no marks: error %d", device->ordinal, (int)result);
		return result;
	}
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
