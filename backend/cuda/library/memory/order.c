// SPDX-License-Identifier: Apache-2.0
#include "order.h"

#include <stdlib.h>

#include "object.h"
#include "pages.h"
#include "pick.h"
#include "tree.h"
#include "view.h"

static struct chunk *chunk_of(const struct pick *pick)
{
	return &pick->region->chunk[pick->index];
}

static size_t bytes_of(const struct pick *pick)
{
	return chunk_bytes(pick->region, pick->index);
}

/* Run time after which unused memory leaves the working set, in milliseconds. */
#define KEPT 1000

/* Learning */

/* Sets `argument`, a bool, if something that begins in the range was used. */
static void uses_any(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, void *argument)
{
	bool *any = argument;

	(void)region;
	(void)offset;
	for (const CUdeviceptr end = at + bytes; at < end && !*any; at += GG_CHUNK)
		*any = pages_used(at);
}

static void forget_uses(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, void *argument)
{
	(void)region;
	(void)offset;
	(void)argument;
	for (const CUdeviceptr end = at + bytes; at < end; at += GG_CHUNK)
		if (pages_used(at))
			pages_first(at, 0);
}

/* Calls `visit` for each range of addresses of a region. */
static void each_place(struct region *region,
		       void (*visit)(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, void *),
		       void *argument)
{
	if (region->object)
		view_each(region, visit, argument);
	else
		visit(region, region->address, region->reserved, 0, argument);
}

static uint32_t earlier(uint32_t one, uint32_t other)
{
	return !one || (other && other < one) ? other : one;
}

/* Gives chunks the number of their first use: the lowest of their pages, at any address. `first`: the number that
 * applies to the page before the range; returns the one for its last page. */
static uint32_t see(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, uint32_t first)
{
	const size_t end = offset + bytes;

	for (size_t i = chunk_at(region, offset); offset < end; i++) {
		const size_t next = chunk_offset(region, i) + chunk_bytes(region, i);

		for (; offset < next && offset < end; offset += GG_CHUNK, at += GG_CHUNK) {
			first = pages_first(at, first);
			region->chunk[i].first = earlier(region->chunk[i].first, first);
		}
	}
	return first;
}

/* As in pick.c for heat: an object that begins in one view continues in the next if that is mapped right behind it. */
static void see_views(const struct device *device)
{
	CUdeviceptr end = 0;
	uint32_t first = 0;

	for (const struct view *view = view_from(0); view; view = view_after(view)) {
		if (view->region->device != device)
			continue;
		first = see(view->region, view->address, view->bytes, view->offset, view->address == end ? first : 0);
		end = view->address + view->bytes;
	}
}

/* Gives an object that moves as a whole the first use of any part of it. */
static void even_out(struct region *region)
{
	uint32_t first = 0, order = 0;

	for (size_t i = 0; i < region->chunks; i++) {
		first = earlier(first, region->chunk[i].first);
		order = earlier(order, region->chunk[i].order);
	}
	for (size_t i = 0; i < region->chunks; i++) {
		region->chunk[i].first = first;
		region->chunk[i].order = order;
	}
}

static void learn(struct region_tree *tree, struct region *region, uint32_t now)
{
	if (object_is_whole(region))
		even_out(region);
	for (size_t i = 0; i < region->chunks; i++) {
		struct chunk *chunk = &region->chunk[i];

		if (!chunk->first != !chunk->order)
			*(chunk->first ? &tree->missed : &tree->over) += chunk_bytes(region, i);
		if (chunk->first)
			chunk->used_at = now;
		if (chunk->first || now - chunk->used_at >= KEPT)
			chunk->order = chunk->first;
		chunk->first = 0;
	}
}

void order_learn(struct device *device, uint64_t usec)
{
	struct region_tree *tree = device->regions;
	struct region *region;
	bool any = false, is_first;

	pthread_mutex_lock(&tree_lock);
	region = tree->ring;
	is_first = !tree->ran;
	for (bool more = region != NULL; more && !any; more = (region = region->next) != tree->ring)
		each_place(region, uses_any, &any);
	tree->ran += any ? usec : 0;
	region = tree->ring;
	for (bool more = any; more; more = (region = region->next) != tree->ring)
		if (!region->object)
			see(region, region->address, region->reserved, 0, 0);
	if (any)
		see_views(device);
	region = tree->ring;
	if (any)
		tree->missed = tree->over = 0;
	for (bool more = any; more; more = (region = region->next) != tree->ring)
		learn(tree, region, (uint32_t)(tree->ran / 1000));
	if (is_first)
		tree->missed = tree->over = 0;
	pthread_mutex_unlock(&tree_lock);
}

void order_begin(struct device *device)
{
	struct region_tree *tree = device->regions;
	struct region *region;

	pthread_mutex_lock(&tree_lock);
	region = tree->ring;
	for (bool more = region != NULL; more; more = (region = region->next) != tree->ring)
		each_place(region, forget_uses, NULL);
	pthread_mutex_unlock(&tree_lock);
}

/* Telling */

struct sums {
	uint64_t used, resident;
};

static void sum(struct pick *pick, void *argument)
{
	struct sums *sums = argument;

	if (!chunk_of(pick)->order)
		return;
	sums->used += bytes_of(pick);
	if (chunk_of(pick)->place == CHUNK_DEVICE)
		sums->resident += bytes_of(pick);
}

void order_sums(struct device *device, uint64_t *used, uint64_t *resident)
{
	struct sums sums = { 0 };

	pthread_mutex_lock(&tree_lock);
	pick_each(device->regions, sum, &sums);
	pthread_mutex_unlock(&tree_lock);
	*used = sums.used;
	*resident = sums.resident;
}

void order_misses(struct device *device, uint64_t *missed, uint64_t *over)
{
	pthread_mutex_lock(&tree_lock);
	*missed = device->regions->missed;
	*over = device->regions->over;
	pthread_mutex_unlock(&tree_lock);
}

/* Choosing */

/*
 * The first of the chunks looked at, in order, up to the bytes wanted: a heap, with the last of them on top. What moves
 * as a whole is one entry in it, as its first chunk, until all its chunks are added at the end.
 */
struct choice {
	struct pick *picks;
	size_t count, chunks, most;
	uint64_t bytes, want;
	size_t whole_most;	/* largest object that may go as a whole, in bytes */
	enum chunk_place from;	/* where the chunks are; those on the GPU go in reverse order */
};

static size_t unit_chunks(const struct pick *pick)
{
	return object_is_whole(pick->region) ? pick->region->chunks : 1;
}

static size_t unit_bytes(const struct pick *pick)
{
	return object_is_whole(pick->region) ? pick->region->reserved : bytes_of(pick);
}

static bool unit_movable(const struct pick *pick, enum chunk_place from)
{
	for (size_t i = 0; i < unit_chunks(pick); i++)
		if (!pick_movable(&(struct pick){ pick->region, pick->index + i }, from))
			return false;
	return true;
}

/* Chunks used by one pointer have the same number; they are ordered by address. */
static int by_order(const void *a, const void *b)
{
	const uint32_t one = chunk_of(a)->order, other = chunk_of(b)->order;

	return one != other ? (one < other ? -1 : 1) : pick_by_address(a, b);
}

/* Whether `one` is to move before `other`. */
static bool is_before(const struct choice *choice, const struct pick *one, const struct pick *other)
{
	return choice->from == CHUNK_HOST ? by_order(one, other) < 0 : by_order(one, other) > 0;
}

static void exchange(struct pick *one, struct pick *other)
{
	const struct pick kept = *one;

	*one = *other;
	*other = kept;
}

static void push(struct choice *choice, const struct pick *pick)
{
	size_t at = choice->count++;

	choice->picks[at] = *pick;
	choice->bytes += unit_bytes(pick);
	choice->chunks += unit_chunks(pick);
	for (; at && is_before(choice, &choice->picks[(at - 1) / 2], &choice->picks[at]); at = (at - 1) / 2)
		exchange(&choice->picks[(at - 1) / 2], &choice->picks[at]);
}

static void pop(struct choice *choice)
{
	size_t at = 0, child;

	choice->bytes -= unit_bytes(&choice->picks[0]);
	choice->chunks -= unit_chunks(&choice->picks[0]);
	choice->picks[0] = choice->picks[--choice->count];
	while ((child = 2 * at + 1) < choice->count) {
		if (child + 1 < choice->count && is_before(choice, &choice->picks[child], &choice->picks[child + 1]))
			child++;
		if (!is_before(choice, &choice->picks[at], &choice->picks[child]))
			break;
		exchange(&choice->picks[at], &choice->picks[child]);
		at = child;
	}
}

static void choose(struct pick *pick, void *argument)
{
	struct choice *choice = argument;

	if (!chunk_of(pick)->order || (object_is_whole(pick->region) && pick->index) ||
	    !unit_movable(pick, choice->from))
		return;
	if (object_is_whole(pick->region) && pick->region->reserved > choice->whole_most)
		return;
	/* Chunks that come back must fit into the room there is. */
	if (unit_chunks(pick) > choice->most || (choice->from == CHUNK_HOST && unit_bytes(pick) > choice->want))
		return;
	if (choice->bytes >= choice->want && !is_before(choice, pick, &choice->picks[0]))
		return;
	/* Chunks pushed out by an object that is pushed out itself in the end are left for the next look. */
	while (choice->chunks + unit_chunks(pick) > choice->most) {
		if (!is_before(choice, pick, &choice->picks[0]))
			return;
		pop(choice);
	}
	push(choice, pick);
	while (choice->bytes - unit_bytes(&choice->picks[0]) >= choice->want)
		pop(choice);
}

static size_t choose_all(struct region_tree *tree, struct choice *choice)
{
	size_t end;

	if (choice->want)
		pick_each(tree, choose, choice);
	while (choice->from == CHUNK_HOST && choice->bytes > choice->want)
		pop(choice);
	end = choice->chunks;
	for (size_t i = choice->count; i-- > 0;) {
		const struct pick unit = choice->picks[i];

		for (size_t j = unit_chunks(&unit); j-- > 0;) {
			choice->picks[--end] = (struct pick){ unit.region, unit.index + j };
			chunk_of(&choice->picks[end])->busy = true;
		}
	}
	return choice->chunks;
}

size_t order_next(struct device *device, size_t want, struct pick *picks, size_t most)
{
	struct choice choice = { .picks = picks, .most = most, .want = want, .whole_most = SIZE_MAX,
				 .from = CHUNK_HOST };
	size_t count;

	pthread_mutex_lock(&tree_lock);
	count = choose_all(device->regions, &choice);
	qsort(picks, count, sizeof(*picks), by_order);
	pthread_mutex_unlock(&tree_lock);
	return count;
}

size_t order_last(struct region_tree *tree, size_t want, size_t whole_most, struct pick *picks, size_t most)
{
	struct choice choice = { .picks = picks, .most = most, .want = want, .whole_most = whole_most,
				 .from = CHUNK_DEVICE };

	return choose_all(tree, &choice);
}
