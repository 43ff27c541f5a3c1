// SPDX-License-Identifier: Apache-2.0
#include "lane.h"

#include "bare.h"
#include "clean.h"
#include "driver.h"
#include "hash.h"
#include "host.h"
#include "kept.h"
#include "log.h"
#include "moment.h"
#include "object.h"
#include "place.h"
#include "pool.h"
#include "tree.h"
#include "turn.h"
#include "view.h"

/* Most bytes of copies in flight, if that is more than one run. */
#define AHEAD_BYTES (4 * PLACE_RUN_BYTES)
/* Attempts to undo something. */
#define TRIES 3
/* Most chunks marked together: those of a run. One with a handle of the driver's has no copies, and no marks. */
#define MARKED_MOST (PLACE_RUN_BYTES / GG_CHUNK)

/* Splits a batch into runs: consecutive chunks in one region, up to PLACE_RUN_BYTES, or all that one handle holds. */
static size_t runs_of(const struct batch *batch, struct lane_run *runs)
{
	size_t count = 0;

	for (size_t i = 0; i < batch->count; i++) {
		struct lane_run *last = count ? &runs[count - 1] : NULL;

		if (last && batch->pick[i].region == batch->pick[i - 1].region &&
		    batch->pick[i].index == batch->pick[i - 1].index + 1 &&
		    (batch->whole[i] || batch->join || last->bytes + batch->bytes[i] <= PLACE_RUN_BYTES)) {
			last->count++;
			last->bytes += batch->bytes[i];
			continue;
		}
		runs[count++] = (struct lane_run){ .first = i, .count = 1, .bytes = batch->bytes[i] };
	}
	return count;
}

void lane_begin(struct lane *lane, struct batch *batch)
{
	lane->batch = batch;
	lane->count = batch ? runs_of(batch, lane->run) : 0;
	lane->sent = lane->landed = 0;
	lane->ahead = 0;
	lane->since = 0;
	lane->shut = lane->unsure = lane->keeps = false;
}

bool lane_flies(const struct lane *lane)
{
	return lane->landed < lane->sent;
}

/* Windows */

/* Reserves addresses for `bytes`, unless there are some. */
static CUresult reserve(struct window *window, size_t bytes)
{
	CUresult result = CUDA_SUCCESS;

	if (window->address)
		return CUDA_SUCCESS;
	result = real.cuMemAddressReserve(&window->address, bytes, 0, 0, 0);
	if (result != CUDA_SUCCESS)
		window->address = 0;
	window->bytes = bytes;
	return result;
}

/* Maps memory behind what is mapped in the window. */
static CUresult show(struct window *window, CUmemGenericAllocationHandle memory, size_t bytes)
{
	const CUresult result = real.cuMemMap(window->address + window->mapped, bytes, 0, memory, 0);

	window->mapped += result == CUDA_SUCCESS ? bytes : 0;
	return result;
}

/* Makes what the window maps from `from` on accessible to copies. */
static CUresult allow(const struct device *device, const struct window *window, size_t from)
{
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};

	if (from == window->mapped)
		return CUDA_SUCCESS;
	return real.cuMemSetAccess(window->address + from, window->mapped - from, &access, 1);
}

/* Unmaps the first `bytes` that the window maps. */
static CUresult hide(struct window *window, size_t bytes)
{
	CUresult result = bytes ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;

	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		result = real.cuMemUnmap(window->address + window->gone, bytes);
	window->gone += result == CUDA_SUCCESS ? bytes : 0;
	return result;
}

void lane_drop(struct window *window)
{
	CUresult result, freed = CUDA_ERROR_UNKNOWN;

	if (!window->address)
		return;
	result = hide(window, window->mapped - window->gone);
	for (int try = 0; try < TRIES && freed != CUDA_SUCCESS && result == CUDA_SUCCESS; try++)
		freed = real.cuMemAddressFree(window->address, window->bytes);
	if (freed != CUDA_SUCCESS)
		log_line("a window stays: errors %d, %d", (int)result, (int)freed);
	*window = (struct window){ 0 };
}

/* All bytes of a batch, which is the most that a window is reserved for. */
static size_t bytes_of(const struct batch *batch)
{
	size_t bytes = 0;

	for (size_t i = 0; i < batch->count; i++)
		bytes += batch->bytes[i];
	return bytes;
}

/* Maps a window on the parts of objects to be copied: the program may have mapped them nowhere, or where no GPU may
 * read them. */
static CUresult show_sources(struct device *device, struct batch *batch, struct lane_run *run)
{
	struct window *window = &batch->sources;
	CUresult result = CUDA_SUCCESS;
	const size_t from = window->mapped;
	size_t allowed = from;

	for (size_t i = run->first; i < run->first + run->count && result == CUDA_SUCCESS; i++) {
		const bool behind = batch->whole[i] && batch->pick[i].index;	/* the handle is mapped already */

		if (batch->source[i])
			continue;
		result = reserve(window, bytes_of(batch));
		if (result != CUDA_SUCCESS)
			break;
		batch->source[i] = behind ? batch->source[i - 1] + batch->bytes[i - 1] :
				   window->address + window->mapped;
		if (!behind)
			result = show(window, batch->from[i],
				      batch->whole[i] ? batch->pick[i].region->reserved : batch->bytes[i]);
		if (result == CUDA_SUCCESS && window->mapped - allowed >= PLACE_RUN_BYTES) {
			result = allow(device, window, allowed);
			allowed = window->mapped;
		}
	}
	run->shown = window->mapped - from;
	return result == CUDA_SUCCESS ? allow(device, window, allowed) : result;
}

/* Allocates GPU memory for an incoming run, mapped in the window. Nothing of the program may be running: cuMemSetAccess
 * waits for kernels (measured on an H200), and more could pass the open gate meanwhile. The memory is released with the
 * batch. */
static CUresult make_room(struct device *device, struct batch *batch, const struct lane_run *run)
{
	struct window *window = &batch->window;
	CUresult result = reserve(window, bytes_of(batch));
	const size_t from = window->mapped;
	size_t at = from;

	for (size_t i = run->first; i < run->first + run->count && result == CUDA_SUCCESS; i++) {
		CUmemGenericAllocationHandle memory = 0;

		if (!batch->join)
			result = pool_create(device, chunk_class(batch->pick[i].region, batch->pick[i].index), &memory);
		if (result != CUDA_SUCCESS)
			break;
		batch->to[i] = (struct spare){ memory, window->address + at };
		at += batch->bytes[i];
		if (!batch->join)
			result = show(window, memory, batch->bytes[i]);
	}
	if (result == CUDA_SUCCESS && batch->join)
		result = show(window, batch->joined, run->bytes);
	return result == CUDA_SUCCESS ? allow(device, window, from) : result;
}

/* Sending */

static CUevent *event_of(struct device *device, const struct lane *lane, size_t run)
{
	return &device->mover->event[lane->batch->in][run % LANE_AHEAD];
}

/* The chunks of a run to be marked, and their marks. */
struct marked {
	size_t count;
	size_t of[MARKED_MOST];		/* indices in the batch */
	CUdeviceptr at[MARKED_MOST];
	size_t bytes[MARKED_MOST];
	struct mark mark[MARKED_MOST];
};

static void add(struct marked *marked, const struct batch *batch, size_t i, CUdeviceptr at)
{
	if (marked->count == MARKED_MOST)
		return;
	marked->of[marked->count] = i;
	marked->at[marked->count] = at;
	marked->bytes[marked->count++] = batch->bytes[i];
}

/* Makes all of the marks; false: none. */
static bool make_marks(struct device *device, struct lane *lane, struct marked *marked)
{
	const struct hash_order order = {
		.stream = device->mover->stream[MOVER_MARKS], .wait_us = device->mover->copy_us, .count = marked->count,
		.at = marked->at, .bytes = marked->bytes,
	};

	return marked->count && hash_ready(device) &&
	       hash_chunks(device, &order, marked->mark, &lane->unsure) == CUDA_SUCCESS;
}

static struct chunk *chunk_of(const struct batch *batch, size_t i)
{
	return &batch->pick[i].region->chunk[batch->pick[i].index];
}

/* Whether a chunk's mark was made in the current gap, so that it is still right. */
static bool is_marked(const struct device *device, const struct batch *batch, size_t i)
{
	const uint64_t gap = turn_gap(device);

	return gap && chunk_of(batch, i)->gap == gap && !view_is_shared(batch->pick[i].region);
}

static void found(struct batch *batch, size_t i, const struct mark *mark)
{
	batch->clean[i] = mark->low == batch->mark[i].low && mark->high == batch->mark[i].high;
	clean_found(&batch->pick[i], batch->clean[i]);
}

/* Finds out which chunks of a run still equal their copies. */
static void compare(struct device *device, struct lane *lane, const struct lane_run *run)
{
	struct batch *batch = lane->batch;
	struct marked marked = { .count = 0 };

	for (size_t i = run->first; i < run->first + run->count; i++)
		if (batch->kept[i] && is_marked(device, batch, i))
			found(batch, i, &chunk_of(batch, i)->now);
		else if (batch->kept[i] && !turn_is_over(device))
			add(&marked, batch, i, batch->source[i]);
	if (make_marks(device, lane, &marked))
		for (size_t i = 0; i < marked.count; i++)
			found(batch, marked.of[i], &marked.mark[i]);
}

/* Submits the copies of a run, and behind them its event. */
static CUresult copy(struct device *device, const struct lane *lane, const struct lane_run *run)
{
	CUevent *event = event_of(device, lane, lane->sent);
	CUstream stream = device->mover->stream[lane->batch->in];
	const struct batch *batch = lane->batch;
	CUresult result = CUDA_SUCCESS;

	if (!*event)
		result = real.cuEventCreate(event, CU_EVENT_DISABLE_TIMING);
	for (size_t i = run->first; i < run->first + run->count && result == CUDA_SUCCESS; i++)
		result = batch->clean[i] ? CUDA_SUCCESS :
			 real.cuMemcpyDtoDAsync_v2(batch->to[i].window, batch->source[i], batch->bytes[i], stream);
	if (result == CUDA_SUCCESS)
		result = real.cuEventRecord(*event, stream);
	return result;
}

bool lane_send(struct device *device, struct lane *lane, uint64_t *room)
{
	struct lane_run *run = &lane->run[lane->sent];
	struct batch *batch = lane->batch;

	if (lane->shut || lane->sent == lane->count || lane->sent - lane->landed == LANE_AHEAD ||
	    (lane_flies(lane) && lane->ahead + run->bytes > AHEAD_BYTES) || run->bytes > *room)
		return false;
	if (show_sources(device, batch, run) != CUDA_SUCCESS ||
	    (batch->in && make_room(device, batch, run) != CUDA_SUCCESS)) {
		lane->shut = true;
		return false;
	}
	if (*room != UINT64_MAX)
		*room -= run->bytes;
	if (!batch->in)
		compare(device, lane, run);
	if (lane->unsure || copy(device, lane, run) != CUDA_SUCCESS) {
		lane->shut = lane->unsure = true;	/* part of it may run, with no event to tell */
		return false;
	}
	if (!lane_flies(lane))
		lane->since = moment_us();
	lane->ahead += run->bytes;
	lane->sent++;
	return true;
}

/* Landing */

/* Marks those chunks of a run that may keep their host memory as a copy. */
static void mark(struct device *device, struct lane *lane, const struct lane_run *run)
{
	struct batch *batch = lane->batch;
	struct marked marked = { .count = 0 };

	for (size_t i = run->first; i < run->first + run->count; i++) {
		const bool is_known = is_marked(device, batch, i);

		if (batch->imported[i] || (!is_known && turn_is_over(device)) || !clean_may_keep(&batch->pick[i]))
			continue;
		batch->marked[i] = is_known;
		batch->mark[i] = chunk_of(batch, i)->now;
		if (!is_known)
			add(&marked, batch, i, batch->to[i].window);
	}
	if (make_marks(device, lane, &marked))
		for (size_t i = 0; i < marked.count; i++) {
			batch->mark[marked.of[i]] = marked.mark[i];
			batch->marked[marked.of[i]] = true;
		}
}

bool lane_mark(struct device *device, struct lane *lane)
{
	struct lane_run *run = &lane->run[lane->sent];
	struct batch *batch = lane->batch;
	struct marked marked = { .count = 0 };
	const uint64_t gap = turn_gap(device);

	if (lane->shut || lane->sent == lane->count || !gap || show_sources(device, batch, run) != CUDA_SUCCESS)
		return false;
	lane->sent++;
	for (size_t i = run->first; i < run->first + run->count; i++)
		if (!batch->whole[i] && !is_marked(device, batch, i) && !view_is_shared(batch->pick[i].region) &&
		    clean_wants_mark(&batch->pick[i]))
			add(&marked, batch, i, batch->source[i]);
	if (make_marks(device, lane, &marked))
		for (size_t i = 0; i < marked.count; i++) {
			chunk_of(batch, marked.of[i])->now = marked.mark[i];
			chunk_of(batch, marked.of[i])->gap = gap;
		}
	else
		lane->shut = marked.count;
	return !lane->unsure;
}

/* Whether what goes out is mapped nowhere until the program may use it again (bare.h), by when it may have come
 * back. */
static bool stays_bare(const struct batch *batch, const struct region *region)
{
	return !batch->in && !batch->within && !batch->join && bare_may(region);
}

/* Maps the new chunks at the addresses of a run, or leaves the old ones there. */
static bool remap(struct batch *batch, const struct lane_run *run)
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
	if (stays_bare(batch, place.region)) {
		place_bare(&place);
		return true;
	}
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

bool lane_land(struct device *device, struct lane *lane, uint64_t *room)
{
	struct batch *batch = lane->batch;
	const struct lane_run *run = &lane->run[lane->landed];
	CUresult result;
	bool moved;

	if (!lane_flies(lane))
		return false;
	result = real.cuEventQuery(*event_of(device, lane, lane->landed));
	if (result == CUDA_ERROR_NOT_READY && moment_us() < lane->since + device->mover->copy_us)
		return false;
	if (result != CUDA_SUCCESS) {
		log_line("device %d: a copy failed or does not end: %d", device->ordinal, (int)result);
		lane->shut = lane->unsure = true;
		return false;
	}
	if (batch->in && !batch->within)
		mark(device, lane, run);
	moved = !lane->unsure && remap(batch, run);
	for (size_t i = run->first; i < run->first + run->count; i++)
		batch->moved[i] = moved;
	/* Memory mapped in a window must not be freed. */
	if (room && !lane->keeps && hide(&batch->sources, run->shown) != CUDA_SUCCESS)
		lane->keeps = true;
	if (room && !lane->keeps && moved) {
		for (size_t i = run->first; i < run->first + run->count; i++)
			lane_settle(device, batch, i);
		*room += run->bytes;
	}
	lane->ahead -= run->bytes;
	lane->landed++;
	lane->since = moment_us();
	return true;
}

/* Frees the host chunk of a pick. */
static void free_host(struct device *device, const struct batch *batch, size_t i, enum chunk_class class)
{
	const struct spare spare = { batch->from[i], batch->from_window[i] };

	(batch->imported[i] ? host_drop : host_give)(device, class, spare);
}

void lane_settle(struct device *device, struct batch *batch, size_t i)
{
	struct region *region = batch->pick[i].region;
	const enum chunk_class class = chunk_class(region, batch->pick[i].index);
	const struct spare *to = &batch->to[i];

	if (batch->settled[i])
		return;
	batch->settled[i] = true;
	if (batch->join) {
		const bool on_gpu = region->chunk[batch->pick[i].index].place == CHUNK_DEVICE;

		clean_forget(region, batch->pick[i].index);
		tree_moved(&batch->pick[i], CHUNK_DEVICE, 0, 0);
		if (on_gpu) {
			kept_release(device, batch->from[i]);
			pool_uncharge(device, batch->bytes[i]);
		} else {
			free_host(device, batch, i, class);
			pool_uncharge_swapped(device, batch->bytes[i]);
		}
	} else if (batch->in) {
		tree_moved(&batch->pick[i], CHUNK_DEVICE, to->memory, 0);
		if (batch->within && !batch->home)
			tree_shareable(&batch->pick[i]);
		if (batch->within)
			kept_release(device, batch->from[i]);
		else if (batch->marked[i])
			clean_keep(&batch->pick[i], (struct spare){ batch->from[i], batch->from_window[i] },
				   batch->mark[i]);
		else
			free_host(device, batch, i, class);
	} else {
		tree_moved(&batch->pick[i], CHUNK_HOST, to->memory, to->window);
		if (batch->within)
			free_host(device, batch, i, class);
		else if (!batch->whole[i])
			kept_release(device, batch->from[i]);
		else if (!batch->pick[i].index)
			kept_release(device, object_part(region));
	}
}
