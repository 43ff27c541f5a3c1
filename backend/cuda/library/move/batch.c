// SPDX-License-Identifier: Apache-2.0
#include "batch.h"

#include "calm.h"
#include "carry.h"
#include "clean.h"
#include "driver.h"
#include "gate.h"
#include "host.h"
#include "kept.h"
#include "log.h"
#include "moment.h"
#include "object.h"
#include "pick.h"
#include "place.h"
#include "pool.h"
#include "tree.h"
#include "turn.h"
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
/* For how long memory of the host is made for a batch, us, where none is ready: 64 MiB take 20 ms, and longer while
 * others make some, and the daemon waits for an answer no longer than for a call and a second (RECLAIM_S of
 * backend/cuda/managed.py). */
#define MAKE_US 200000
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
		batch->source[i] = region->object || place_is_bare(region, picks[i].index) ?
					   chunk->window :
					   region->address + chunk_offset(region, picks[i].index);
		batch->bytes[i] = chunk_bytes(region, picks[i].index);
		batch->whole[i] = object_is_whole(region);
		batch->from[i] = batch->whole[i] ? region->object->whole : chunk->memory;
		batch->from_window[i] = chunk->window;
		batch->imported[i] = chunk->imported;
	}
	return batch;
}

/* A chunk of the host: the copy that the chunk has, or one. Where the host is short, the copy of another. */
static bool take_host(struct device *device, struct batch *batch, size_t i)
{
	const enum chunk_class class = batch_class(batch, i);

	batch->kept[i] = clean_take(&batch->pick[i], &batch->to[i], &batch->mark[i]);
	return batch->kept[i] || (host_is_short(device, class) && clean_steal(device, class, &batch->to[i])) ||
	       host_take(device, class, &batch->to[i]) == CUDA_SUCCESS;
}

struct batch *batch_new_out(struct device *device, const struct pick *picks, size_t count)
{
	struct batch *batch = batch_new(false, picks, count);
	const uint64_t start = moment_us();
	size_t i = 0;

	if (batch && device_borrow(device)) {
		/* What goes as a whole is one, however long it takes. */
		while (i < count &&
		       (!i || (batch->whole[i] && batch->pick[i].index) || moment_us() - start < MAKE_US) &&
		       take_host(device, batch, i))
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

/* What a batch came to, bytes. */
struct outcome {
	uint64_t moved;
	uint64_t stayed;	/* but of what comes instead of something else, whose room it has not taken */
	uint64_t all;
	uint64_t clean;		/* of what moved: what was not copied */
};

static bool took_room(const struct batch *batch, size_t i)
{
	return !batch->instead || batch->to[i].memory;
}

/* Everything is where `moved` says, and what serves nothing is freed. A context is borrowed, or needs not. */
static struct outcome land(struct device *device, struct batch *batch)
{
	struct outcome outcome = { 0 };

	lane_drop(&batch->window);
	lane_drop(&batch->sources);
	for (size_t i = 0; i < batch->count; i++) {
		const struct spare *to = &batch->to[i];

		if (batch->moved[i]) {
			lane_settle(device, batch, i);
			outcome.moved += batch->bytes[i];
			outcome.clean += batch->clean[i] ? batch->bytes[i] : 0;
		} else {
			outcome.stayed += took_room(batch, i) ? batch->bytes[i] : 0;
			if (batch->in && to->memory)
				kept_release(device, to->memory);
			else if (to->memory)
				host_give(device, batch_class(batch, i), *to);
		}
		outcome.all += batch->bytes[i];
	}
	return outcome;
}

/* Its chunks are let go. */
static void put(struct device *device, const struct batch *batch, const struct outcome *outcome)
{
	if (!batch->join)
		pick_put(batch->pick, batch->count);
	else if (batch->count)
		settle_join(device, batch, outcome->moved);
}

/* The end of a batch that moves alone. */
static struct outcome settle(struct device *device, struct batch *batch)
{
	const struct outcome outcome = land(device, batch);

	/* In the books what went is on the GPU until mover_booked; once it is let go it may be freed, as that. What was
	 * to come is there in the books, too. */
	if (!batch->within)
		pool_credit(device, batch->in ? outcome.stayed : outcome.moved);
	put(device, batch, &outcome);
	return outcome;
}

/* ... of two; of what comes `stuck` bytes have room, and their own end. */
static void settle_both(struct device *device, struct batch *out, struct batch *in, uint64_t stuck,
			struct outcome *went, struct outcome *came)
{
	*went = land(device, out);
	*came = land(device, in);
	/* What came has taken the place of something that went before: it is less. */
	pool_credit(device, went->moved - came->moved - stuck);
	put(device, out, went);
	put(device, in, came);
}

void batch_cancel(struct device *device, struct batch *batch)
{
	const bool borrowed = device_borrow(device);

	settle(device, batch);
	if (borrowed)
		device_return(device);
	free(batch);
}

bool batch_reap(struct device *device)
{
	struct mover *mover = device->mover;
	bool borrowed;

	if (!mover->stuck[0] && !mover->stuck[1])
		return true;
	borrowed = device_borrow(device);
	if (!borrowed && __atomic_load_n(&device->primary, __ATOMIC_ACQUIRE))
		return false;
	/* In another context than theirs, or in none: that one is gone, and they with it. The thread that destroyed it
	 * holds it until it has freed all that was in there, what waits for them too. */
	if (!borrowed || mover->made_in != device->contexts || carry_idle(device))
		for (int i = 0; i < 2; i++) {
			if (mover->stuck[i])
				settle(device, mover->stuck[i]);
			free(mover->stuck[i]);
			mover->stuck[i] = NULL;
		}
	if (borrowed)
		device_return(device);
	return !mover->stuck[0] && !mover->stuck[1];
}

/* What has not moved stays behind, stuck: those that have are settled. Returns the bytes that have room on the GPU. */
static uint64_t give_up(struct device *device, struct batch *batch)
{
	struct batch *rest = calloc(1, sizeof(*rest));
	size_t kept = 0, settled = 0;
	uint64_t bytes = 0;

	if (!rest)
		abort();	/* nothing may be freed, and nothing kept */
	*rest = *batch;
	for (size_t i = 0; i < batch->count; i++) {
		struct batch *of = batch->moved[i] ? batch : rest;
		size_t at = batch->moved[i] ? settled++ : kept++;

		bytes += batch->moved[i] || !took_room(batch, i) ? 0 : batch->bytes[i];
		of->pick[at] = batch->pick[i];
		of->source[at] = batch->source[i];
		of->bytes[at] = batch->bytes[i];
		of->from[at] = batch->from[i];
		of->from_window[at] = batch->from_window[i];
		of->imported[at] = batch->imported[i];
		of->whole[at] = batch->whole[i];
		of->to[at] = batch->to[i];
		of->kept[at] = batch->kept[i];
		of->mark[at] = batch->mark[i];
		of->clean[at] = batch->clean[i];
		of->marked[at] = batch->marked[i];
		of->settled[at] = batch->settled[i];
		of->moved[at] = batch->moved[i];
	}
	batch->count = settled;
	batch->window = batch->sources = (struct window){ 0 };	/* the rest has them */
	rest->count = kept;
	device->mover->stuck[batch->in] = rest;
	return bytes;
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

/* Other GPUs of the process may be using the memory of a batch. */
static bool users_quiet(struct device *device, const struct batch *batch)
{
	struct users users = { .device = device, .quiet = true };

	for (size_t i = 0; batch && i < batch->count; i++)
		if (!i || batch->pick[i].region != batch->pick[i - 1].region)
			users.which |= view_users(batch->pick[i].region);
	if (users.which & ~(UINT64_C(1) << device->ordinal))
		device_each(wait_for, &users);
	return users.quiet;
}

/* What one call of move() took, us. */
struct taken {
	uint64_t waited, closed, all;
};

static void say(const struct device *device, const struct batch *batch, const struct outcome *outcome,
		const struct taken *taken)
{
	if (outcome->clean)
		log_line("device %d: %llu MiB were clean", device->ordinal,
			 (unsigned long long)(outcome->clean / GG_MIB));
	log_line("device %d: %s%s %llu of %llu MiB, waited %llu us, closed %llu us, %llu us in all", device->ordinal,
		 batch->home ? "home, " : "", batch->in ? "in" : "out", (unsigned long long)(outcome->moved / GG_MIB),
		 (unsigned long long)(outcome->all / GG_MIB), (unsigned long long)taken->waited,
		 (unsigned long long)taken->closed, (unsigned long long)taken->all);
}

/* How much moves at a time, after that much did in one closed gate. */
static void learn(struct mover *mover, bool gap, const struct outcome *outcome, const struct taken *taken)
{
	uint64_t fits;

	if (outcome->moved != outcome->all || !outcome->moved || !taken->closed || outcome->clean)
		return;
	/* Of a program that waits for its turn it is as much as is asked for (mover.c). */
	if (gap)
		return;
	fits = (uint64_t)((double)outcome->moved * (double)may_close(taken->waited) / (double)taken->closed);
	/* Small ones tell little. */
	if (outcome->moved >= mover->batch_bytes / 2 || fits < mover->batch_bytes)
		mover->batch_bytes = fits < BATCH_LEAST ? BATCH_LEAST : fits > BYTES_MOST ? BYTES_MOST : fits;
}

/* Closes the gate, and carries them, either of which may be NULL; false: it did not close. `sure`: no copy runs on. A
 * context is borrowed then, where `borrowed` says so. */
static bool carry_closed(struct device *device, struct batch *out, struct batch *in, bool *sure, bool *borrowed,
			 struct taken *taken)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	uint64_t begun;

	taken->waited = moment_us();
	*borrowed = false;
	*sure = true;
	/* The gate first: a thread that destroys a context is inside, and waits for those that borrow it. */
	if (!calm_close(device, GATE_MS)) {
		log_line("device %d: the gate does not close", device->ordinal);
		device->mover->waited_us += moment_us() - taken->waited;
		calm_over(device, false);
		return false;
	}
	*borrowed = calm_quiet(device, device) && users_quiet(device, out) && users_quiet(device, in) &&
		    device_borrow(device);
	begun = moment_us();
	taken->waited = begun - taken->waited;
	device->mover->waited_us += taken->waited;
	calm_over(device, *borrowed);
	if (*borrowed) {
		real.cuThreadExchangeStreamCaptureMode(&mode);
		if (carry_prepare(device) == CUDA_SUCCESS)
			*sure = carry(device, out, in);
		real.cuThreadExchangeStreamCaptureMode(&mode);
	} else {
		log_line("device %d: what runs does not end", device->ordinal);
	}
	taken->closed = moment_us() - begun;
	device->mover->closed_us += taken->closed;
	/* The places are right before any thread goes on; memory is freed after. */
	gate_open();
	return true;
}

bool batch_mark(struct device *device, struct batch *batch)
{
	struct lane *lane = &device->mover->lane[MOVER_OUT];
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
	bool is_sure;

	lane_begin(lane, batch);
	real.cuThreadExchangeStreamCaptureMode(&mode);
	while (lane_mark(device, lane))
		;
	is_sure = !lane->unsure || carry_awaits(device);
	real.cuThreadExchangeStreamCaptureMode(&mode);
	if (is_sure) {
		lane_drop(&batch->sources);
		return !lane->shut;
	}
	/* What is read still may neither be freed nor moved. */
	give_up(device, batch);
	return false;
}

uint64_t batch_move(struct device *device, struct batch *batch)
{
	struct taken taken = { 0 };
	struct outcome outcome = { 0 };
	bool borrowed, sure;
	uint64_t start;

	if (carry_closed(device, batch->in ? NULL : batch, batch->in ? batch : NULL, &sure, &borrowed, &taken)) {
		start = moment_us() - taken.closed;
		if (!sure)
			give_up(device, batch);
		outcome = settle(device, batch);
		if (borrowed)
			device_return(device);
		taken.all = moment_us() - start;
		device->mover->busy_us += taken.all;
		say(device, batch, &outcome, &taken);
		learn(device->mover, turn_gap(device), &outcome, &taken);
	} else {
		settle(device, batch);
	}
	free(batch);
	return outcome.moved;
}

uint64_t batch_exchange(struct device *device, struct batch *out, struct batch *in)
{
	struct outcome went = { 0 }, came = { 0 };
	struct taken taken = { 0 };
	bool borrowed, sure;
	uint64_t start, stuck = 0;
	const bool closed = carry_closed(device, out, in, &sure, &borrowed, &taken);

	start = moment_us() - taken.closed;
	if (!sure) {
		give_up(device, out);
		stuck = give_up(device, in);
	}
	settle_both(device, out, in, stuck, &went, &came);
	if (borrowed)
		device_return(device);
	taken.all = moment_us() - start;
	if (closed) {
		device->mover->busy_us += taken.all;
		say(device, out, &went, &taken);
		say(device, in, &came, &taken);
	}
	free(out);
	free(in);
	return came.moved;
}
