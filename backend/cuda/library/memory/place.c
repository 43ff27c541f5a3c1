// SPDX-License-Identifier: Apache-2.0
#include "place.h"

#include "driver.h"
#include "log.h"
#include "object.h"
#include "tree.h"
#include "turn.h"
#include "view.h"

/* Attempts to undo something. */
#define TRIES 3

/* The memory behind a run, or to be mapped there: one handle, one per chunk, or, with neither given, what the books
 * say. */
struct behind {
	CUmemGenericAllocationHandle whole;
	const CUmemGenericAllocationHandle *chunks;
};

/* A part of a region, and where it is mapped. */
struct spot {
	CUdeviceptr address;
	size_t from, to;
	const struct view *view;	/* NULL: at the region's own addresses */
};

static struct spot spot_of(const struct place_run *run, const struct view *view)
{
	const struct region *region = run->region;
	const size_t last = run->first + run->count - 1;
	struct spot spot = {
		.from = chunk_offset(region, run->first),
		.to = chunk_offset(region, last) + chunk_bytes(region, last),
		.view = view,
	};

	if (!view) {
		spot.address = region->address + spot.from;
		return spot;
	}
	if (spot.from < view->offset)
		spot.from = view->offset;
	if (spot.to > view->offset + view->bytes)
		spot.to = view->offset + view->bytes;
	spot.address = view->address + (spot.from - view->offset);
	return spot;
}

static bool is_empty(const struct spot *spot)
{
	return spot->from >= spot->to;
}

bool place_is_bare(const struct region *region, size_t index)
{
	return __atomic_load_n(&region->chunk[index].bare, __ATOMIC_RELAXED);
}

static void set_bare(const struct place_run *run, bool is_bare)
{
	for (size_t i = run->first; i < run->first + run->count; i++)
		if (place_is_bare(run->region, i) != is_bare) {
			__atomic_store_n(&run->region->chunk[i].bare, is_bare, __ATOMIC_RELAXED);
			__atomic_add_fetch(&turn_bare, is_bare ? 1 : -1, __ATOMIC_SEQ_CST);
		}
}

void place_bare(const struct place_run *run)
{
	set_bare(run, true);
}

/* The part of a run from `from` on that is not bare; without chunks: there is none. */
static struct place_run covered_from(const struct place_run *run, size_t from)
{
	const size_t end = run->first + run->count;
	struct place_run part = { .region = run->region, .first = from };

	while (part.first < end && place_is_bare(run->region, part.first))
		part.first++;
	while (part.first + part.count < end && !place_is_bare(run->region, part.first + part.count))
		part.count++;
	return part;
}

static CUresult unmap(const struct spot *spot, size_t bytes, int tries)
{
	CUresult result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < tries && result != CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemUnmap, (spot->address, bytes));
	return result;
}

/* Maps the memory of a spot; returns the bytes mapped. */
static size_t map(const struct place_run *run, const struct spot *spot, struct behind behind, CUresult *result)
{
	const struct region *region = run->region;
	size_t at = spot->from;

	*result = CUDA_SUCCESS;
	if (behind.whole) {
		CALL_REAL(*result, cuMemMap, (spot->address, spot->to - spot->from, spot->from, behind.whole, 0));
		return *result == CUDA_SUCCESS ? spot->to - spot->from : 0;
	}
	for (size_t i = chunk_at(region, at); at < spot->to; i++) {
		const size_t start = chunk_offset(region, i), end = start + chunk_bytes(region, i);
		const size_t upto = end < spot->to ? end : spot->to;

		CALL_REAL(*result, cuMemMap,
			  (spot->address + (at - spot->from), upto - at, at - start,
			   behind.chunks ? behind.chunks[i - run->first] : region->chunk[i].memory, 0));
		if (*result != CUDA_SUCCESS)
			break;
		at = upto;
	}
	return at - spot->from;
}

static size_t describe(const struct access *access, CUmemAccessDesc *descriptions)
{
	size_t count = 0;

	for (int ordinal = 0; ordinal < GG_ORDINALS; ordinal++)
		if (access->read >> ordinal & 1)
			descriptions[count++] = (CUmemAccessDesc){
				.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal },
				.flags = access->write >> ordinal & 1 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE :
									CU_MEM_ACCESS_FLAGS_PROT_READ,
			};
	return count;
}

static bool same(const struct access *one, const struct access *other)
{
	return one->read == other->read && one->write == other->write;
}

/* Where the first driver call for [from, to) of a spot ends: at the end of a mapping. */
static size_t end_of_call(const struct place_run *run, size_t from, size_t to, struct behind behind)
{
	const struct region *region = run->region;
	size_t end = from, i = chunk_at(region, from);

	if (behind.whole)
		return to;
	do {
		end = chunk_offset(region, i) + chunk_bytes(region, i);
		i++;
	} while (end < to && end - from + chunk_bytes(region, i) <= PLACE_RUN_BYTES);
	return end < to ? end : to;
}

/* Sets access with as few calls as there are kinds of access and runs. */
static CUresult allow(const struct place_run *run, const struct spot *spot, struct behind behind)
{
	CUmemAccessDesc access[GG_ORDINALS];
	CUresult result = CUDA_SUCCESS;
	size_t count = 0;

	if (!spot->view) {
		pthread_mutex_lock(&tree_lock);
		count = tree_access(run->region, access);
		pthread_mutex_unlock(&tree_lock);
	}
	for (size_t from = spot->from, to; from < spot->to && result == CUDA_SUCCESS; from = to) {
		to = end_of_call(run, from, spot->to, behind);
		if (spot->view) {
			const struct access *has = &spot->view->access[(from - spot->view->offset) / GG_CHUNK];
			size_t pages = 1;

			while (pages < (to - from) / GG_CHUNK && same(has, &has[pages]))
				pages++;
			to = from + pages * GG_CHUNK;
			count = describe(has, access);
		}
		if (count)
			CALL_REAL(result, cuMemSetAccess,
				  (spot->address + (from - spot->from), to - from, access, count));
	}
	return result;
}

static CUresult enter(const struct place_run *run, const struct spot *spot, struct behind behind)
{
	CUresult result;
	size_t mapped;

	if (!behind.chunks && !behind.whole && run->region->object)
		behind.whole = run->region->object->whole;
	mapped = map(run, spot, behind, &result);
	if (result == CUDA_SUCCESS)
		result = allow(run, spot, behind);
	if (result == CUDA_SUCCESS && !spot->view)
		set_bare(run, false);
	if (result != CUDA_SUCCESS && mapped && unmap(spot, mapped, TRIES) != CUDA_SUCCESS)
		log_line("%zu bytes at %llx stay mapped", mapped, spot->address);
	return result;
}

/* An iteration over all spots of a run. */
struct walk {
	const struct view *next;
	bool own;	/* the region's own addresses are still to come */
};

static struct walk walk_over(const struct place_run *run)
{
	const struct object *object = run->region->object;

	return (struct walk){ .next = object ? object->views : NULL, .own = !object };
}

static bool step(const struct place_run *run, struct walk *walk, struct spot *spot)
{
	if (walk->own) {
		walk->own = false;
		*spot = spot_of(run, NULL);
		return true;
	}
	while (walk->next) {
		*spot = spot_of(run, walk->next);
		walk->next = walk->next->next;
		if (!is_empty(spot))
			return true;
	}
	return false;
}

/* Unmaps the first `most` spots. */
static void leave_again(const struct place_run *run, size_t most)
{
	struct walk walk = walk_over(run);
	struct spot spot;

	for (size_t i = 0; i < most && step(run, &walk, &spot); i++)
		if (unmap(&spot, spot.to - spot.from, TRIES) != CUDA_SUCCESS)
			log_line("%zu bytes at %llx stay mapped", spot.to - spot.from, spot.address);
}

/* Maps again what has just been unmapped. */
static void enter_again(const struct place_run *run, const struct spot *spot)
{
	CUresult result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		result = enter(run, spot, (struct behind){ 0 });
	if (result != CUDA_SUCCESS)
		log_line("%zu bytes at %llx are lost: error %d", spot->to - spot->from, spot->address, (int)result);
}

/* Unmaps what of a region's own addresses is mapped, or nothing. */
static CUresult leave_own(const struct place_run *run, int tries)
{
	struct place_run part = covered_from(run, run->first);
	CUresult result = CUDA_SUCCESS;
	struct spot spot;

	for (; part.count && result == CUDA_SUCCESS; part = covered_from(run, part.first + part.count)) {
		spot = spot_of(&part, NULL);
		result = unmap(&spot, spot.to - spot.from, tries);
		if (result != CUDA_SUCCESS)
			break;	/* at that part */
	}
	if (result == CUDA_SUCCESS)
		return result;
	for (struct place_run before = covered_from(run, run->first); before.first < part.first;
	     before = covered_from(run, before.first + before.count)) {
		spot = spot_of(&before, NULL);
		enter_again(&before, &spot);
	}
	return result;
}

bool place_leave_region(struct region *region)
{
	const struct place_run run = { region, 0, region->chunks };

	if (leave_own(&run, TRIES) == CUDA_SUCCESS) {
		set_bare(&run, false);
		return true;
	}
	/* It stays, and the program may go on with it. */
	for (size_t i = 0; i < region->chunks; i++) {
		const struct place_run one = { region, i, 1 };
		const struct spot spot = spot_of(&one, NULL);

		if (place_is_bare(region, i))
			enter_again(&one, &spot);
	}
	return false;
}

bool place_leave(const struct place_run *run)
{
	struct walk walk = walk_over(run);
	CUresult result = CUDA_SUCCESS;
	struct spot spot;
	size_t left = 0;

	if (!run->region->object)
		return leave_own(run, 1) == CUDA_SUCCESS;
	while (step(run, &walk, &spot) && (result = unmap(&spot, spot.to - spot.from, 1)) == CUDA_SUCCESS)
		left++;
	if (result == CUDA_SUCCESS)
		return true;
	walk = walk_over(run);
	for (size_t i = 0; i < left && step(run, &walk, &spot); i++)
		enter_again(run, &spot);
	return false;
}

static CUresult enter_all(const struct place_run *run, struct behind behind)
{
	struct walk walk = walk_over(run);
	CUresult result = CUDA_SUCCESS;
	struct spot spot;
	size_t entered = 0;

	while (step(run, &walk, &spot) && (result = enter(run, &spot, behind)) == CUDA_SUCCESS)
		entered++;
	if (result != CUDA_SUCCESS)
		leave_again(run, entered);
	return result;
}

CUresult place_enter(const struct place_run *run, const CUmemGenericAllocationHandle *memory)
{
	return enter_all(run, (struct behind){ .chunks = memory });
}

CUresult place_enter_whole(const struct place_run *run, CUmemGenericAllocationHandle whole)
{
	return enter_all(run, (struct behind){ .whole = whole });
}

CUresult place_enter_view(const struct view *view)
{
	const struct place_run run = { view->region, 0, view->region->chunks };
	const struct spot spot = spot_of(&run, view);

	return enter(&run, &spot, (struct behind){ 0 });
}
