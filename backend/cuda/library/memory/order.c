// SPDX-License-Identifier: Apache-2.0
#include "order.h"

#include <stdlib.h>

#include "pages.h"
#include "pick.h"
#include "tree.h"

static struct chunk *chunk_of(const struct pick *pick)
{
	return &pick->region->chunk[pick->index];
}

static size_t bytes_of(const struct pick *pick)
{
	return chunk_bytes(pick->region, pick->index);
}

/* Milliseconds for which a program runs until what it does not use any more is no part of its working set. */
#define KEPT 1000

/* Learning */

static bool uses_any(const struct region *region)
{
	for (CUdeviceptr at = region->address; at < region->address + region->reserved; at += GG_CHUNK)
		if (pages_used(at))
			return true;
	return false;
}

/* A chunk is used first when the first of its pages is. */
static void learn(struct region *region, uint32_t now)
{
	CUdeviceptr at = region->address;
	uint32_t first = 0;

	for (size_t i = 0; i < region->chunks; i++) {
		const CUdeviceptr end = at + chunk_bytes(region, i);
		struct chunk *chunk = &region->chunk[i];
		uint32_t order = 0;

		for (; at < end; at += GG_CHUNK) {
			first = pages_first(at, first);
			if (first && (!order || first < order))
				order = first;
		}
		if (order)
			chunk->used_at = now;
		if (order || now - chunk->used_at >= KEPT)
			chunk->order = order;
	}
}

void order_learn(struct device *device, uint64_t usec)
{
	struct region_tree *tree = device->regions;
	struct region *region;
	bool any = false;

	pthread_mutex_lock(&tree_lock);
	region = tree->ring;
	for (bool more = region != NULL; more && !any; more = (region = region->next) != tree->ring)
		any = uses_any(region);
	tree->ran += any ? usec : 0;
	region = tree->ring;
	for (bool more = any; more; more = (region = region->next) != tree->ring)
		learn(region, (uint32_t)(tree->ran / 1000));
	pthread_mutex_unlock(&tree_lock);
}

void order_begin(struct device *device)
{
	struct region_tree *tree = device->regions;
	struct region *region;

	pthread_mutex_lock(&tree_lock);
	region = tree->ring;
	for (bool more = region != NULL; more; more = (region = region->next) != tree->ring)
		for (CUdeviceptr at = region->address; at < region->address + region->reserved; at += GG_CHUNK)
			if (pages_used(at))
				pages_first(at, 0);
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

/* Choosing */

/* As many of those that were looked at as are wanted, of the ones that come first: a heap, whose top comes last. */
struct choice {
	struct pick *picks;
	size_t count, most;
	uint64_t bytes, want;
	enum chunk_place from;	/* and what is there goes: from the GPU in the reverse order */
};

/* Those of one pointer have one number: then by address. */
static int by_order(const void *a, const void *b)
{
	const uint32_t one = chunk_of(a)->order, other = chunk_of(b)->order;

	return one != other ? (one < other ? -1 : 1) : pick_by_address(a, b);
}

/* Whether one comes before the other. */
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
	choice->bytes += bytes_of(pick);
	for (; at && is_before(choice, &choice->picks[(at - 1) / 2], &choice->picks[at]); at = (at - 1) / 2)
		exchange(&choice->picks[(at - 1) / 2], &choice->picks[at]);
}

static void pop(struct choice *choice)
{
	size_t at = 0, child;

	choice->bytes -= bytes_of(&choice->picks[0]);
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
	const bool enough = choice->bytes >= choice->want || choice->count == choice->most;

	if (!chunk_of(pick)->order || !pick_movable(pick, choice->from) || !choice->most)
		return;
	/* What comes back must not be more than there is room for. */
	if (choice->from == CHUNK_HOST && bytes_of(pick) > choice->want)
		return;
	if (enough && !is_before(choice, pick, &choice->picks[0]))
		return;
	if (choice->count == choice->most)
		pop(choice);
	push(choice, pick);
	while (choice->bytes - bytes_of(&choice->picks[0]) >= choice->want)
		pop(choice);
}

static size_t choose_all(struct region_tree *tree, struct choice *choice)
{
	if (choice->want)
		pick_each(tree, choose, choice);
	while (choice->from == CHUNK_HOST && choice->bytes > choice->want)
		pop(choice);
	for (size_t i = 0; i < choice->count; i++)
		chunk_of(&choice->picks[i])->busy = true;
	return choice->count;
}

size_t order_next(struct device *device, size_t want, struct pick *picks, size_t most)
{
	struct choice choice = { .picks = picks, .most = most, .want = want, .from = CHUNK_HOST };

	pthread_mutex_lock(&tree_lock);
	choose_all(device->regions, &choice);
	qsort(picks, choice.count, sizeof(*picks), by_order);
	pthread_mutex_unlock(&tree_lock);
	return choice.count;
}

size_t order_last(struct region_tree *tree, size_t want, struct pick *picks, size_t most)
{
	struct choice choice = { .picks = picks, .most = most, .want = want, .from = CHUNK_DEVICE };

	return choose_all(tree, &choice);
}
