// SPDX-License-Identifier: Apache-2.0
#include "tree.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "chunk.h"
#include "daemon.h"
#include "gate.h"
#include "keeper.h"
#include "lent.h"
#include "life.h"
#include "moment.h"
#include "pages.h"

/* Nanoseconds between two looks whether the GPU has reached an old copy. */
#define LOOK_NS 5000000

pthread_mutex_t tree_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t tree_idle = PTHREAD_COND_INITIALIZER;
uint64_t tree_serials;

static CUresult set_up(struct device *device)
{
	device->regions = calloc(1, sizeof(*device->regions));
	return device->regions ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void forget(void)
{
	tree_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	moment_condition(&tree_idle);
}

void tree_report_pinned(struct device *device, int64_t change)
{
	if (!change)
		return;
	__atomic_add_fetch(&device->foreign, (uint64_t)change, __ATOMIC_RELAXED);
	daemon_report(device);
}

void tree_lend(struct region *region, int fd)
{
	const bool lent = lent_give(LENT_REGION(region->serial), fd);

	pthread_mutex_lock(&tree_lock);
	region->lent |= lent;
	pthread_mutex_unlock(&tree_lock);
}

size_t tree_access(const struct region *region, CUmemAccessDesc *access)
{
	const struct region_tree *tree = region->device->regions;
	const CUmemAccessDesc of = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	size_t count = 0;

	access[count] = of;
	access[count++].location.id = region->device->ordinal;
	for (size_t i = 0; i < tree->peer_count && count < GG_DEVICES; i++) {
		access[count] = of;
		access[count++].location.id = tree->peers[i];
	}
	return count;
}

void tree_await(struct device *device)
{
	static bool made;	/* with the lock: a wake-up before the first wait is lost without harm */
	const struct region_tree *tree = device->regions;
	struct timespec until;

	pthread_mutex_unlock(&tree_lock);
	/* The awaited chunk may be moving, and the move may wait for this thread, which is inside the gate, to
	 * leave. */
	gate_beg();
	/* Work that the mover postponed, as the GPU had not come to it, may be done by now. */
	if (tree->reap)
		tree->reap(device);
	pthread_mutex_lock(&tree_lock);
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += LOOK_NS;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	if (!made)
		moment_condition(&tree_idle);
	made = true;
	pthread_cond_timedwait(&tree_idle, &tree_lock, &until);
	gate_beg_no_more();
}

/* With the lock held. */
static void count(const struct region *region, int sign)
{
	struct region_tree *tree = region->device->regions;

	for (size_t i = 0; i < region->chunks; i++) {
		if (region->chunk[i].imported)
			tree->imported += sign * chunk_bytes(region, i);
		if (region->chunk[i].place == CHUNK_DEVICE)
			tree->resident[chunk_class(region, i)] += sign * chunk_bytes(region, i);
		if (region->chunk[i].pinned)
			tree->pinned += sign * chunk_bytes(region, i);
	}
}

bool tree_insert(struct region *region)
{
	struct region_tree *tree = region->device->regions;
	uint64_t resident[CLASSES];
	bool inserted;

	pthread_mutex_lock(&tree_lock);
	inserted = region->object || pages_ready(region->address, region->reserved);
	if (inserted) {
		region->serial = ++tree_serials;
		for (size_t i = 0; i < region->chunks; i++) {
			region->chunk[i].pinned = false;
			region->chunk[i].heat = tree->usual;
		}
		if (tree->ring) {	/* just behind the hand, so that its turn comes last */
			region->next = tree->ring;
			region->previous = tree->ring->previous;
		} else {
			tree->ring = region->next = region->previous = region;
			tree->hand = 0;
		}
		region->previous->next = region->next->previous = region;
		if (!region->object)
			pages_set(region, region);
		count(region, 1);
	}
	memcpy(resident, tree->resident, sizeof(resident));
	pthread_mutex_unlock(&tree_lock);
	if (inserted && __atomic_load_n(&region->device->index, __ATOMIC_RELAXED) >= 0)
		keeper_expect(region->device, resident, 0);
	return inserted;
}

void tree_remove(struct region *region)
{
	struct region_tree *tree = region->device->regions;

	if (tree->ring == region) {
		tree->ring = region->next == region ? NULL : region->next;
		tree->hand = 0;
	}
	region->previous->next = region->next;
	region->next->previous = region->previous;
	if (!region->object)
		pages_set(region, NULL);
	count(region, -1);
}

void tree_moved(const struct pick *pick, enum chunk_place place, CUmemGenericAllocationHandle memory,
		  CUdeviceptr window)
{
	struct chunk *chunk = &pick->region->chunk[pick->index];
	const size_t bytes = chunk_bytes(pick->region, pick->index);
	struct region_tree *tree = pick->region->device->regions;

	pthread_mutex_lock(&tree_lock);
	if (chunk->place != place)
		tree->resident[chunk_class(pick->region, pick->index)] += place == CHUNK_DEVICE ? bytes : -bytes;
	if (chunk->imported)
		tree->imported -= bytes;
	chunk->imported = false;
	chunk->memory = memory;
	chunk->place = place;
	chunk->window = window;
	pthread_mutex_unlock(&tree_lock);
}

void tree_shareable(const struct pick *pick)
{
	pthread_mutex_lock(&tree_lock);
	pick->region->chunk[pick->index].shareable = true;
	pthread_mutex_unlock(&tree_lock);
}

void tree_imported(const struct pick *pick)
{
	pthread_mutex_lock(&tree_lock);
	pick->region->chunk[pick->index].imported = true;
	pick->region->device->regions->imported += chunk_bytes(pick->region, pick->index);
	pthread_mutex_unlock(&tree_lock);
}

bool tree_has_imported(struct device *device)
{
	pthread_mutex_lock(&tree_lock);
	bool imported = device->regions->imported != 0;
	pthread_mutex_unlock(&tree_lock);
	return imported;
}

void tree_classes(struct device *device, uint64_t resident[CLASSES])
{
	pthread_mutex_lock(&tree_lock);
	memcpy(resident, device->regions->resident, sizeof(device->regions->resident));
	pthread_mutex_unlock(&tree_lock);
}

uint64_t tree_pinned(struct device *device)
{
	pthread_mutex_lock(&tree_lock);
	uint64_t bytes = device->regions->pinned;
	pthread_mutex_unlock(&tree_lock);
	return bytes;
}

LIFE(.stage = LIFE_REGIONS, .set_up = set_up, .forget = forget);
