// SPDX-License-Identifier: Apache-2.0
/* Which chunks go, and which come back: a CLOCK over all of a device, the second chance by what was touched. */
#include "tree.h"

#include <stdlib.h>

/* The chunk under the hand, which then goes on; false: there is none at all. With the lock. */
static bool tick(struct region_tree *tree, struct pick *pick)
{
	if (!tree->ring)
		return false;
	if (tree->hand >= tree->ring->chunks) {
		tree->ring = tree->ring->next;
		tree->hand = 0;
	}
	*pick = (struct pick){ tree->ring, tree->hand++ };
	return true;
}

static bool was_touched(const struct region *region, size_t index)
{
	return pages_touched(region->address + chunk_offset(region, index), chunk_bytes(region, index));
}

/* With the lock. */
static bool movable(const struct pick *pick, enum chunk_place from)
{
	const struct chunk *chunk = &pick->region->chunk[pick->index];

	return !chunk->busy && !pick->region->freeing && chunk->place == from;
}

static void age(struct chunk *chunk, bool touched)
{
	chunk->heat = (uint8_t)(chunk->heat / 2 + (touched ? 128 : 0));
}

static size_t chunks_of(const struct region_tree *tree)
{
	const struct region *region = tree->ring;
	size_t total = 0;

	do
		total += region ? region->chunks : 0;
	while (region && (region = region->next) != tree->ring);
	return total;
}

static int by_address(const void *a, const void *b)
{
	const struct pick *one = a, *other = b;

	if (one->region != other->region)
		return one->region->address < other->region->address ? -1 : 1;
	return one->index < other->index ? -1 : one->index > other->index;
}

size_t region_pick_out(struct device *device, size_t want, struct pick *picks, size_t most)
{
	struct region_tree *tree = device->regions;
	size_t count = 0, bytes = 0;
	struct pick pick;

	pthread_mutex_lock(&region_lock);
	/* Twice around: what was touched gets its second chance in the first round. */
	for (size_t steps = 2 * chunks_of(tree) + 1; steps && bytes < want && count < most && tick(tree, &pick); steps--) {
		struct chunk *chunk = &pick.region->chunk[pick.index];
		bool touched = was_touched(pick.region, pick.index);

		age(chunk, touched);
		if (touched || chunk->pinned || !movable(&pick, CHUNK_DEVICE))
			continue;
		chunk->busy = true;
		bytes += chunk_bytes(pick.region, pick.index);
		picks[count++] = pick;
	}
	pthread_mutex_unlock(&region_lock);
	qsort(picks, count, sizeof(*picks), by_address);
	return count;
}

/* Calls `visit` for each chunk in the host that can be moved. With the lock. */
static void each_swapped(struct region_tree *tree, void (*visit)(struct pick *pick, uint8_t heat, void *), void *argument)
{
	struct region *region = tree->ring;

	if (!region)
		return;
	do {
		for (size_t i = 0; i < region->chunks; i++) {
			struct pick pick = { region, i };

			if (!movable(&pick, CHUNK_HOST))
				continue;
			visit(&pick, region->chunk[i].heat, argument);
		}
		region = region->next;
	} while (region != tree->ring);
}

struct hottest {
	uint64_t bytes[256];	/* by heat */
	unsigned int from;	/* this heat and more */
	size_t want, got, count, most;
	struct pick *picks;
};

static void weigh(struct pick *pick, uint8_t heat, void *argument)
{
	struct hottest *hottest = argument;
	struct chunk *chunk = &pick->region->chunk[pick->index];

	(void)heat;
	age(chunk, was_touched(pick->region, pick->index));
	hottest->bytes[chunk->heat] += chunk_bytes(pick->region, pick->index);
}

static void collect(struct pick *pick, uint8_t heat, void *argument)
{
	struct hottest *hottest = argument;
	size_t bytes = chunk_bytes(pick->region, pick->index);

	if (heat < hottest->from || hottest->count == hottest->most || hottest->got + bytes > hottest->want)
		return;
	pick->region->chunk[pick->index].busy = true;
	hottest->picks[hottest->count++] = *pick;
	hottest->got += bytes;
}

size_t region_pick_in(struct device *device, size_t want, struct pick *picks, size_t most)
{
	struct hottest hottest = { .want = want, .most = most, .picks = picks, .from = 256 };
	uint64_t above = 0;

	pthread_mutex_lock(&region_lock);
	each_swapped(device->regions, weigh, &hottest);
	/* All that is hotter than the coldest that is needed, then of those what fits. */
	while (hottest.from && above + hottest.bytes[hottest.from - 1] < want)
		above += hottest.bytes[--hottest.from];
	each_swapped(device->regions, collect, &hottest);
	if (hottest.from) {
		hottest.from--;
		each_swapped(device->regions, collect, &hottest);
	}
	pthread_mutex_unlock(&region_lock);
	qsort(picks, hottest.count, sizeof(*picks), by_address);
	return hottest.count;
}

size_t region_pick_range(CUdeviceptr address, size_t bytes, struct pick *picks, size_t most)
{
	struct region *region;
	size_t count = 0;

	pthread_mutex_lock(&region_lock);
	region = pages_region(address);
	if (region && !region->freeing) {
		size_t last = chunk_at(region, address - region->address + (bytes ? bytes - 1 : 0));

		for (size_t i = chunk_at(region, address - region->address); i <= last && i < region->chunks; i++) {
			struct pick pick = { region, i };

			if (count == most || !movable(&pick, CHUNK_HOST))
				continue;
			region->chunk[i].busy = true;
			picks[count++] = pick;
		}
	}
	pthread_mutex_unlock(&region_lock);
	return count;
}
