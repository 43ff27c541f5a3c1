// SPDX-License-Identifier: Apache-2.0
#include "carry.h"

#include "driver.h"
#include "log.h"
#include "moment.h"
#include "place.h"
#include "quiet.h"

#include <string.h>
#include <time.h>

/* Chunks that are copied, and then remapped together while the next are copied. */
#define RUN_BYTES (64 * GG_MIB)
#define LOOK_NS 20000
/* What undoes something is tried so often. */
#define TRIES 3

/* Of a batch: neighbours, which are remapped by one call. */
struct run {
	size_t first, count;
	size_t bytes;
};

CUresult carry_prepare(struct device *device)
{
	struct mover *mover = device->mover;
	CUresult result = CUDA_SUCCESS;

	if (mover->made_in == device->contexts)
		return CUDA_SUCCESS;
	/* Those of before went with their context. */
	memset(mover->stream, 0, sizeof(mover->stream));
	memset(mover->event, 0, sizeof(mover->event));
	for (int i = 0; i < 2 && result == CUDA_SUCCESS; i++)
		result = real.cuStreamCreate(&mover->stream[i], CU_STREAM_NON_BLOCKING);
	if (result == CUDA_SUCCESS)
		mover->made_in = device->contexts;
	else if (mover->stream[0])
		real.cuStreamDestroy_v2(mover->stream[0]);
	return result;
}

bool carry_idle(struct device *device)
{
	for (int i = 0; i < 2; i++)
		if (!quiet_ended(device->mover->stream[i]))
			return false;
	return true;
}

static CUresult await(struct device *device, CUevent event)
{
	const struct timespec moment = { .tv_nsec = LOOK_NS };
	const uint64_t until = moment_us() + device->mover->copy_us;
	CUresult result;

	while ((result = real.cuEventQuery(event)) == CUDA_ERROR_NOT_READY && moment_us() < until)
		nanosleep(&moment, NULL);
	return result;
}

static bool await_streams(struct device *device)
{
	const struct timespec moment = { .tv_nsec = LOOK_NS };
	const uint64_t until = moment_us() + device->mover->copy_us;
	bool is_idle;

	while (!(is_idle = carry_idle(device)) && moment_us() < until)
		nanosleep(&moment, NULL);
	return is_idle;
}

/* Neighbours in one region, up to RUN_BYTES, or all of what one handle is behind. */
static size_t runs_of(const struct batch *batch, struct run *runs)
{
	size_t count = 0;

	for (size_t i = 0; i < batch->count; i++) {
		struct run *last = count ? &runs[count - 1] : NULL;

		if (last && batch->pick[i].region == batch->pick[i - 1].region &&
		    batch->pick[i].index == batch->pick[i - 1].index + 1 &&
		    (batch->whole[i] || batch->join || last->bytes + batch->bytes[i] <= RUN_BYTES)) {
			last->count++;
			last->bytes += batch->bytes[i];
			continue;
		}
		runs[count++] = (struct run){ .first = i, .count = 1, .bytes = batch->bytes[i] };
	}
	return count;
}

/* Submits the copies of a run, and behind them its event. */
static CUresult copy(struct device *device, const struct batch *batch, const struct run *run, size_t number)
{
	struct mover *mover = device->mover;
	CUstream stream = mover->stream[number % 2];
	CUresult result = CUDA_SUCCESS;

	if (!mover->event[number])
		result = real.cuEventCreate(&mover->event[number], CU_EVENT_DISABLE_TIMING);
	for (size_t i = run->first; i < run->first + run->count && result == CUDA_SUCCESS; i++)
		result = real.cuMemcpyDtoDAsync_v2(batch->to[i].window, batch->source[i], batch->bytes[i], stream);
	if (result == CUDA_SUCCESS)
		result = real.cuEventRecord(mover->event[number], stream);
	return result;
}

/* Remapping */

/* Puts the new chunks behind the addresses of a run, or leaves the old ones there. */
static bool remap(struct batch *batch, const struct run *run)
{
	const struct place_run place = {
		.region = batch->pick[run->first].region, .first = batch->pick[run->first].index, .count = run->count,
	};
	CUmemGenericAllocationHandle to[BATCH_MOST_CHUNKS];
	CUresult result;

	for (size_t i = 0; i < run->count; i++)
		to[i] = batch->to[run->first + i].memory;
	if (!place_leave(&place))
		return false;
	result = batch->join ? place_enter_whole(&place, batch->joined) : place_enter(&place, to);
	if (result == CUDA_SUCCESS)
		return true;
	log_line("cannot remap %zu bytes: error %d", run->bytes, (int)result);
	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		result = place_enter(&place, NULL);
	if (result != CUDA_SUCCESS)
		log_line("%zu bytes at %llx are lost: error %d", run->bytes, batch->source[run->first], (int)result);
	return false;
}

bool carry(struct device *device, struct batch *batch)
{
	struct run runs[BATCH_MOST_CHUNKS];
	const size_t count = runs_of(batch, runs);
	size_t sent;
	bool unsure = false;

	for (sent = 0; sent < count; sent++)
		if (copy(device, batch, &runs[sent], sent) != CUDA_SUCCESS) {
			unsure = true;	/* part of it may run, and no event tells */
			break;
		}
	for (size_t i = 0; i < sent; i++) {
		CUresult result = await(device, device->mover->event[i]);

		if (result != CUDA_SUCCESS) {
			log_line("device %d: a copy failed or does not end: %d", device->ordinal, (int)result);
			unsure = true;
			break;
		}
		if (!remap(batch, &runs[i]))
			continue;
		for (size_t k = runs[i].first; k < runs[i].first + runs[i].count; k++)
			batch->moved[k] = true;
	}
	return !unsure || await_streams(device);
}
