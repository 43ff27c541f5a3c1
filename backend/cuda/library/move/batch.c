// SPDX-License-Identifier: Apache-2.0
#include "batch.h"

#include "calm.h"
#include "carry.h"
#include "driver.h"
#include "gate.h"
#include "host.h"
#include "kept.h"
#include "log.h"
#include "moment.h"
#include "object.h"
#include "pick.h"
#include "pool.h"
#include "tree.h"
#include "view.h"

#include <stdlib.h>
#include <string.h>

/* Bytes that move together: as many as fit into the time for which the gate may be closed, from BATCH_LEAST to this. */
#define BYTES_MOST (4096 * GG_MIB)
/* That time: 25 ms, or where it took long until nothing ran, so much longer than that that moving is most
 * of the stall. A program whose kernels take 50 ms is used to waiting for them, and each of them is slower
 * with more of its memory away. */
#define CLOSED_US 25000
#define CLOSED_MOST_US 200000
#define WAITS_WORTH 3
/* For how long a capture is waited for, or what else has the gate closed. */
#define GATE_MS 50
/* What undoes something is tried so often. */
#define TRIES 3

struct batch *batch_new(bool in, const struct pick *picks, size_t count)
{
	struct batch *batch = calloc(1, sizeof(*batch));

	if (!batch)
		return NULL;
	batch->in = in;
	batch->count = count;
	for (size_t i = 0; i < count; i++) {
		const struct region *region = picks[i].region;
		const struct chunk *chunk = &region->chunk[picks[i].index];

		batch->pick[i] = picks[i];
		batch->source[i] = region->object ? chunk->window :
						    region->address + chunk_offset(region, picks[i].index);
		batch->bytes[i] = chunk_bytes(region, picks[i].index);
		batch->whole[i] = object_is_whole(region);
		batch->from[i] = batch->whole[i] ? region->object->whole : chunk->memory;
		batch->from_window[i] = chunk->window;
		batch->imported[i] = chunk->imported;
	}
	return batch;
}

struct batch *batch_new_out(struct device *device, const struct pick *picks, size_t count)
{
	struct batch *batch = batch_new(false, picks, count);
	size_t i = 0;

	if (batch && device_borrow(device)) {
		while (i < count && host_take(device, batch_class(batch, i), &batch->to[i]) == CUDA_SUCCESS)
			i++;
		/* What goes as a whole goes, or stays. */
		while (i < count && i && batch->whole[i] && batch->pick[i].index) {
			i--;
			host_give(device, batch_class(batch, i), batch->to[i]);
		}
		device_return(device);
	}
	if (i < count)
		pick_put(picks + i, count - i);
	if (batch)
		batch->count = i;
	if (batch && !i) {
		free(batch);
		batch = NULL;
	}
	return batch;
}

void batch_free(struct batch *batch)
{
	free(batch);
}

enum chunk_class batch_class(const struct batch *batch, size_t i)
{
	return chunk_class(batch->pick[i].region, batch->pick[i].index);
}

/* The first `mapped` bytes of a window are mapped. */
static void drop(CUdeviceptr *window, size_t bytes, size_t mapped)
{
	CUresult result = mapped ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS, freed = CUDA_ERROR_UNKNOWN;

	if (!*window)
		return;
	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		result = real.cuMemUnmap(*window, mapped);
	for (int try = 0; try < TRIES && freed != CUDA_SUCCESS && result == CUDA_SUCCESS; try++)
		freed = real.cuMemAddressFree(*window, bytes);
	if (freed != CUDA_SUCCESS)
		log_line("a window stays: errors %d, %d", (int)result, (int)freed);
	*window = 0;
}

void batch_drop_window(struct batch *batch, size_t mapped)
{
	drop(&batch->window, batch->window_bytes, mapped);
}

/* A window on what is to be copied of objects, which the program may have mapped nowhere, or where no GPU may read it.
 * With nothing running, as make_room. */
static bool show_sources(struct device *device, struct batch *batch)
{
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult result = CUDA_SUCCESS;
	size_t mapped = 0, bytes;

	for (size_t i = 0; i < batch->count; i++)
		batch->sources_bytes += batch->source[i] ? 0 : batch->bytes[i];
	if (!batch->sources_bytes)
		return true;
	result = real.cuMemAddressReserve(&batch->sources, batch->sources_bytes, 0, 0, 0);
	if (result != CUDA_SUCCESS)
		batch->sources = 0;
	for (size_t i = 0, shown = 0; i < batch->count && result == CUDA_SUCCESS; i++) {
		if (batch->source[i])
			continue;
		batch->source[i] = batch->sources + shown;
		shown += batch->bytes[i];
		bytes = batch->whole[i] ? batch->pick[i].region->reserved : batch->bytes[i];
		if (batch->whole[i] && batch->pick[i].index)
			continue;
		result = real.cuMemMap(batch->source[i], bytes, 0, batch->from[i], 0);
		mapped += result == CUDA_SUCCESS ? bytes : 0;
	}
	if (result == CUDA_SUCCESS)
		result = real.cuMemSetAccess(batch->sources, batch->sources_bytes, &access, 1);
	if (result != CUDA_SUCCESS)
		drop(&batch->sources, batch->sources_bytes, mapped);
	return result == CUDA_SUCCESS;
}

/* Memory of the GPU for a batch on its way in, at a window. False: none of it. With nothing running:
 * cuMemSetAccess waits for kernels (measured on an H200), and the gate would be open to more of them
 * meanwhile. */
static bool make_room(struct device *device, struct batch *batch)
{
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult result = CUDA_SUCCESS;
	size_t made = 0, mapped = 0;

	for (size_t i = 0; i < batch->count; i++)
		batch->window_bytes += batch->bytes[i];
	for (; made < batch->count && result == CUDA_SUCCESS && !batch->join; made++)
		result = pool_create(device, batch_class(batch, made), &batch->to[made].memory);
	if (result != CUDA_SUCCESS)
		made--;
	if (result == CUDA_SUCCESS)
		result = real.cuMemAddressReserve(&batch->window, batch->window_bytes, 0, 0, 0);
	if (result != CUDA_SUCCESS)
		batch->window = 0;
	for (size_t i = 0; i < batch->count && result == CUDA_SUCCESS; i++) {
		batch->to[i].window = batch->window + mapped;
		if (!batch->join)
			result = real.cuMemMap(batch->to[i].window, batch->bytes[i], 0, batch->to[i].memory, 0);
		if (result == CUDA_SUCCESS)
			mapped += batch->bytes[i];
	}
	if (batch->join && result == CUDA_SUCCESS) {
		result = real.cuMemMap(batch->window, batch->window_bytes, 0, batch->joined, 0);
		mapped = result == CUDA_SUCCESS ? mapped : 0;
	}
	if (result == CUDA_SUCCESS)
		result = real.cuMemSetAccess(batch->window, batch->window_bytes, &access, 1);
	if (result == CUDA_SUCCESS)
		return true;
	batch_drop_window(batch, mapped);
	for (size_t i = 0; i < made; i++)
		kept_release(device, batch->to[i].memory);
	memset(batch->to, 0, sizeof(batch->to));
	return false;
}

/* The chunk that a pick had in the host. */
static void free_host(struct device *device, const struct batch *batch, size_t i)
{
	const struct spare spare = { batch->from[i], batch->from_window[i] };

	(batch->imported[i] ? host_drop : host_give)(device, batch_class(batch, i), spare);
}

/* What is joined was charged when there were to be two of it (join.c). */
static void settle_join(struct device *device, const struct batch *batch, uint64_t moved)
{
	struct region *region = batch->pick[0].region;

	if (moved) {
		object_join(region, batch->joined);
	} else {
		kept_release(device, batch->joined);
		pool_uncharge(device, region->reserved);
	}
	object_put(region);
}

/* The end of a batch: everything is where `moved` says. Returns the bytes that moved. A context is
 * borrowed, or needs not. */
static uint64_t settle(struct device *device, struct batch *batch)
{
	uint64_t moved = 0, stayed = 0;

	if (batch->in)
		batch_drop_window(batch, batch->window_bytes);
	drop(&batch->sources, batch->sources_bytes, batch->sources_bytes);
	for (size_t i = 0; i < batch->count; i++) {
		const enum chunk_class class = batch_class(batch, i);
		const struct spare *to = &batch->to[i];

		if (batch->moved[i] && batch->join) {
			const bool on_gpu = batch->pick[i].region->chunk[batch->pick[i].index].place == CHUNK_DEVICE;

			tree_moved(&batch->pick[i], CHUNK_DEVICE, 0, 0);
			if (on_gpu) {
				kept_release(device, batch->from[i]);
				pool_uncharge(device, batch->bytes[i]);
			} else {
				free_host(device, batch, i);
				pool_uncharge_swapped(device, batch->bytes[i]);
			}
		} else if (batch->moved[i] && batch->in) {
			tree_moved(&batch->pick[i], CHUNK_DEVICE, to->memory, 0);
			if (batch->within) {
				if (!batch->home)
					tree_shareable(&batch->pick[i]);
				kept_release(device, batch->from[i]);
			} else {
				free_host(device, batch, i);
			}
		} else if (batch->moved[i]) {
			tree_moved(&batch->pick[i], CHUNK_HOST, to->memory, to->window);
			if (batch->within)
				free_host(device, batch, i);
			else if (!batch->whole[i])
				kept_release(device, batch->from[i]);
			else if (!batch->pick[i].index)
				kept_release(device, object_part(batch->pick[i].region));
		} else if (batch->in) {
			if (to->memory)
				kept_release(device, to->memory);
		} else {
			host_give(device, class, *to);
		}
		*(batch->moved[i] ? &moved : &stayed) += batch->bytes[i];
	}
	/* In the books it is on the GPU until mover_booked; once it is let go it may be freed, as that. */
	if (!batch->in && !batch->within && moved)
		pool_credit(device, moved);
	/* What was to come is in the books as on the GPU; and the same. */
	if (batch->in && !batch->within && stayed)
		pool_credit(device, stayed);
	if (!batch->join)
		pick_put(batch->pick, batch->count);
	else if (batch->count)
		settle_join(device, batch, moved);
	return moved;
}

bool batch_reap(struct device *device)
{
	struct mover *mover = device->mover;
	struct batch *batch = mover->stuck;
	bool borrowed;

	if (!batch)
		return true;
	borrowed = device_borrow(device);
	if (!borrowed && __atomic_load_n(&device->primary, __ATOMIC_ACQUIRE))
		return false;
	/* In another context than theirs, or in none: that one is gone, and they with it. The thread that destroyed it
	 * holds it until it has freed all that was in there, what waits for them too. */
	if (!borrowed || mover->made_in != device->contexts || carry_idle(device)) {
		settle(device, batch);
		mover->stuck = NULL;
		free(batch);
	}
	if (borrowed)
		device_return(device);
	return !mover->stuck;
}

/* What has not moved stays behind, stuck: those that have are settled. */
static void give_up(struct device *device, struct batch *batch)
{
	struct batch *rest = calloc(1, sizeof(*rest));
	size_t kept = 0, settled = 0;

	if (!rest)
		abort();	/* nothing may be freed, and nothing kept */
	*rest = *batch;
	for (size_t i = 0; i < batch->count; i++) {
		struct batch *of = batch->moved[i] ? batch : rest;
		size_t at = batch->moved[i] ? settled++ : kept++;

		of->pick[at] = batch->pick[i];
		of->source[at] = batch->source[i];
		of->bytes[at] = batch->bytes[i];
		of->from[at] = batch->from[i];
		of->from_window[at] = batch->from_window[i];
		of->imported[at] = batch->imported[i];
		of->whole[at] = batch->whole[i];
		of->to[at] = batch->to[i];
		of->moved[at] = batch->moved[i];
	}
	batch->count = settled;
	batch->window = batch->sources = 0;	/* the rest has them */
	rest->count = kept;
	device->mover->stuck = rest;
}

/* Microseconds for which the gate may be closed, after so many until nothing ran. */
static uint64_t may_close(uint64_t waited)
{
	uint64_t worth = waited * WAITS_WORTH;

	return worth < CLOSED_US ? CLOSED_US : worth > CLOSED_MOST_US ? CLOSED_MOST_US : worth;
}

struct users {
	struct device *device;	/* whose batch it is */
	uint64_t which;		/* a bit an ordinal */
	bool quiet;
};

static void wait_for(struct device *device, void *argument)
{
	struct users *users = argument;

	if (device != users->device && users->which >> device->ordinal & 1)
		users->quiet = users->quiet && device->mover && calm_quiet(users->device, device);
}

/* Other GPUs of the process may be using an object. */
static bool users_quiet(struct device *device, const struct batch *batch)
{
	struct users users = { .device = device, .quiet = true };

	for (size_t i = 0; i < batch->count; i++)
		if (batch->pick[i].region->object && (!i || batch->pick[i].region != batch->pick[i - 1].region))
			users.which |= view_users(batch->pick[i].region);
	if (users.which & ~(UINT64_C(1) << device->ordinal))
		device_each(wait_for, &users);
	return users.quiet;
}

uint64_t batch_move(struct device *device, struct batch *batch)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	struct mover *mover = device->mover;
	uint64_t moved = 0, bytes = 0, waited, begun, closed;
	bool borrowed, sure = true, in = batch->in, home = batch->home;

	waited = moment_us();
	/* The gate first: a thread that destroys a context is inside, and waits for those that borrow it. */
	if (!calm_close(device, GATE_MS)) {
		log_line("device %d: the gate does not close", device->ordinal);
		calm_over(device, false);
		settle(device, batch);
		free(batch);
		return 0;
	}
	borrowed = calm_quiet(device, device) && users_quiet(device, batch) && device_borrow(device);
	begun = moment_us();
	waited = begun - waited;
	calm_over(device, borrowed);
	if (borrowed) {
		real.cuThreadExchangeStreamCaptureMode(&mode);
		if (carry_prepare(device) == CUDA_SUCCESS && show_sources(device, batch) &&
		    (!batch->in || make_room(device, batch)))
			sure = carry(device, batch);
		real.cuThreadExchangeStreamCaptureMode(&mode);
	} else {
		log_line("device %d: what runs does not end", device->ordinal);
	}
	closed = moment_us() - begun;
	/* The places are right before any thread goes on; memory is freed after. */
	gate_open();
	if (!sure)
		give_up(device, batch);
	for (size_t i = 0; i < batch->count; i++)
		bytes += batch->bytes[i];
	moved = settle(device, batch);
	if (borrowed)
		device_return(device);
	mover->busy_us += moment_us() - begun;
	log_line("device %d: %s%s %llu of %llu MiB, waited %llu us, closed %llu us, %llu us in all", device->ordinal,
		  home ? "home, " : "", in ? "in" : "out", (unsigned long long)(moved / GG_MIB),
		  (unsigned long long)(bytes / GG_MIB), (unsigned long long)waited, (unsigned long long)closed,
		  (unsigned long long)(moment_us() - begun));
	if (moved == bytes && moved && closed) {
		uint64_t fits = (uint64_t)((double)moved * (double)may_close(waited) / (double)closed);

		/* Small ones tell little. */
		if (moved >= mover->batch_bytes / 2 || fits < mover->batch_bytes)
			mover->batch_bytes = fits < BATCH_LEAST ? BATCH_LEAST : fits > BYTES_MOST ? BYTES_MOST : fits;
	}
	free(batch);
	return moved;
}
