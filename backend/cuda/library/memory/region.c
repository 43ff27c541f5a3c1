// SPDX-License-Identifier: Apache-2.0
#include "region.h"

#include "backing.h"
#include "life.h"
#include "log.h"
#include "mover.h"
#include "small.h"
#include "tree.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Below it, allocations share a chunk. */
#define SMALL_BELOW GG_MIB
/* How often to look whether the GPU has come to an old copy. */
#define LOOK_NS 5000000

pthread_mutex_t region_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;	/* something is no longer busy */
uint64_t tree_serials;

static CUresult set_up(struct device *device)
{
	device->regions = calloc(1, sizeof(*device->regions));
	return device->regions ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void forget(void)
{
	region_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	idle = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	pages_forget();
}

/* Chunks of a region */

enum chunk_class chunk_class(const struct region *region, size_t index)
{
	enum chunk_class class = 0;

	while (index >= region->count[class])
		index -= region->count[class++];
	return class;
}

size_t chunk_bytes(const struct region *region, size_t index)
{
	return class_bytes[chunk_class(region, index)];
}

size_t chunk_offset(const struct region *region, size_t index)
{
	enum chunk_class class;
	size_t offset = 0;

	for (class = 0; class < CLASSES && index >= region->count[class]; class++) {
		offset += region->count[class] * class_bytes[class];
		index -= region->count[class];
	}
	return class < CLASSES ? offset + index * class_bytes[class] : offset;
}

size_t chunk_at(const struct region *region, size_t offset)
{
	size_t index = 0;

	for (enum chunk_class class = 0; class < CLASSES; class++) {
		if (offset < region->count[class] * class_bytes[class])
			return index + offset / class_bytes[class];
		offset -= region->count[class] * class_bytes[class];
		index += region->count[class];
	}
	return index;
}

bool region_about(CUdeviceptr address, struct region_about *about)
{
	struct region *region;
	uint64_t offset, start, bytes;
	bool found = false;

	if (!region_near(address))
		return false;
	pthread_mutex_lock(&region_lock);
	region = pages_region(address);
	if (region) {
		*about = (struct region_about){
			.start = region->address, .bytes = region->bytes, .serial = region->serial,
			.device = region->device, .context = region->context,
			.region = { region->address, region->reserved, region->serial },
		};
		offset = address - region->address;
		found = !region->small ? offset < region->bytes :
			small_find(region->small, offset, &start, &bytes, &about->serial);
		if (found && region->small) {
			about->start += start;
			about->bytes = bytes;
		}
	}
	pthread_mutex_unlock(&region_lock);
	return found;
}

bool region_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes, struct device **device)
{
	struct region_about about;

	if (!region_about(address, &about))
		return false;
	*start = about.start;
	*bytes = about.bytes;
	*device = about.device;
	return true;
}

/* With the lock. */
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
	bool inserted, pinned;

	pthread_mutex_lock(&region_lock);
	inserted = pages_ready(region);
	pinned = tree->peer_count != 0;
	if (inserted) {
		region->serial = ++tree_serials;
		for (size_t i = 0; i < region->chunks; i++) {
			region->chunk[i].pinned = pinned;
			region->chunk[i].heat = tree->usual;
		}
		if (tree->ring) {	/* just behind the hand: its turn comes last */
			region->next = tree->ring;
			region->previous = tree->ring->previous;
		} else {
			tree->ring = region->next = region->previous = region;
			tree->hand = 0;
		}
		region->previous->next = region->next->previous = region;
		pages_set(region, region);
		count(region, 1);
	}
	memcpy(resident, tree->resident, sizeof(resident));
	pthread_mutex_unlock(&region_lock);
	if (inserted && pinned)
		pinned_report(region->device, (int64_t)region->reserved);
	if (inserted && region->device->index >= 0)
		pool_expect(region->device, resident, 0);
	return inserted;
}

/* With the lock. */
static void remove_region(struct region *region)
{
	struct region_tree *tree = region->device->regions;

	if (tree->ring == region) {
		tree->ring = region->next == region ? NULL : region->next;
		tree->hand = 0;
	}
	region->previous->next = region->next;
	region->next->previous = region->previous;
	pages_set(region, NULL);
	count(region, -1);
}

/* It is to be freed. With the lock. */
static void begin_to_free(struct region *region)
{
	region->freeing = true;
	region->device->regions->frees++;
}

/* Unmaps and frees one that is marked as `freeing`. An error leaves it as it was. */
static CUresult destroy(struct region *region)
{
	struct region_tree *tree = region->device->regions;
	const bool unmapped = backing_unmap(region);

	if (unmapped) {
		pthread_mutex_lock(&region_lock);
		remove_region(region);
		pthread_mutex_unlock(&region_lock);
		backing_return(region);
	}
	pthread_mutex_lock(&region_lock);
	if (!unmapped)
		region->freeing = false;
	tree->frees--;
	pthread_mutex_unlock(&region_lock);
	return unmapped ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

static CUresult alloc_large(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	struct region *region;
	CUresult result = backing_make(device, bytes, alignment, &region);

	if (result != CUDA_SUCCESS)
		return result;
	*address = region->address;
	if (tree_insert(region))
		return CUDA_SUCCESS;
	if (backing_unmap(region))
		backing_return(region);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

static bool any_busy(const struct region *region)
{
	for (size_t i = 0; i < region->chunks; i++)
		if (region->chunk[i].busy)
			return true;
	return false;
}

/* Waits until the mover is done with it. With the lock, which is let go meanwhile: `region` may only be
 * one that cannot be freed by anybody else. */
static void wait_idle(struct region *region)
{
	struct timespec until;

	while (any_busy(region)) {
		pthread_mutex_unlock(&region_lock);
		/* What it left for later, because the GPU did not come to it, may be done by now. */
		mover_reap(region->device);
		pthread_mutex_lock(&region_lock);
		if (!any_busy(region))
			break;
		clock_gettime(CLOCK_MONOTONIC, &until);
		until.tv_nsec += LOOK_NS;
		if (until.tv_nsec >= 1000000000) {
			until.tv_nsec -= 1000000000;
			until.tv_sec++;
		}
		pthread_cond_clockwait(&idle, &region_lock, CLOCK_MONOTONIC, &until);
	}
}

CUresult region_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	if (bytes < SMALL_BELOW && alignment <= SMALL_MAX)
		return packed_alloc(device, bytes, alignment, address);
	return alloc_large(device, bytes, alignment, address);
}

CUresult region_free(CUdeviceptr address)
{
	struct region *region;
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	bool empty = false;

	if (!region_near(address))
		return result;
	pthread_mutex_lock(&region_lock);
	region = pages_region(address);
	if (region && region->small && !region->freeing && packed_free(region, address - region->address, &empty)) {
		result = CUDA_SUCCESS;
		if (!empty)
			region = NULL;
	} else if (region && (region->small || region->freeing || region->address != address)) {
		region = NULL;
	}
	if (region) {
		begin_to_free(region);
		wait_idle(region);
	}
	pthread_mutex_unlock(&region_lock);
	if (!region)
		return result;
	result = destroy(region);
	if (result != CUDA_SUCCESS && region->small) {
		/* It is empty and stays, to be used again. */
		pthread_mutex_lock(&region_lock);
		packed_enter(region);
		pthread_mutex_unlock(&region_lock);
		result = CUDA_SUCCESS;
	}
	return result;
}

/* The next region of a context that is gone, to be freed. */
static struct region *next_gone(struct device *device, CUcontext context)
{
	struct region *first, *region, *found = NULL;

	pthread_mutex_lock(&region_lock);
	first = region = device->regions->ring;
	while (region) {
		if (region->context == context && !region->freeing) {
			found = region;
			break;
		}
		region = region->next == first ? NULL : region->next;
	}
	if (found) {
		begin_to_free(found);
		if (found->small)
			packed_leave(found);
		wait_idle(found);
	}
	pthread_mutex_unlock(&region_lock);
	return found;
}

static void context_gone(struct device *device, CUcontext context)
{
	struct region *region;

	if (!device->regions)
		return;
	while ((region = next_gone(device, context)))
		if (destroy(region) != CUDA_SUCCESS) {
			log_line("device %d: an allocation of a context that is gone stays", device->ordinal);
			pthread_mutex_lock(&region_lock);
			region->freeing = true;
			pthread_mutex_unlock(&region_lock);
		}
}

void region_put(const struct pick *picks, size_t count)
{
	pthread_mutex_lock(&region_lock);
	for (size_t i = 0; i < count; i++)
		picks[i].region->chunk[picks[i].index].busy = false;
	pthread_cond_broadcast(&idle);
	pthread_mutex_unlock(&region_lock);
}

/* A chunk has moved: what is behind it now. It is busy. */
void region_moved(const struct pick *pick, enum chunk_place place, CUmemGenericAllocationHandle memory,
		  CUdeviceptr window)
{
	struct chunk *chunk = &pick->region->chunk[pick->index];
	const size_t bytes = chunk_bytes(pick->region, pick->index);
	struct region_tree *tree = pick->region->device->regions;

	pthread_mutex_lock(&region_lock);
	if (chunk->place != place)
		tree->resident[chunk_class(pick->region, pick->index)] += place == CHUNK_DEVICE ? bytes : -bytes;
	if (chunk->imported)
		tree->imported -= bytes;
	chunk->imported = false;
	chunk->memory = memory;
	chunk->place = place;
	chunk->window = window;
	pthread_mutex_unlock(&region_lock);
}

void region_shareable(const struct pick *pick)
{
	pthread_mutex_lock(&region_lock);
	pick->region->chunk[pick->index].shareable = true;
	pthread_mutex_unlock(&region_lock);
}

void region_imported(const struct pick *pick)
{
	pthread_mutex_lock(&region_lock);
	pick->region->chunk[pick->index].imported = true;
	pick->region->device->regions->imported += chunk_bytes(pick->region, pick->index);
	pthread_mutex_unlock(&region_lock);
}

bool region_has_imported(struct device *device)
{
	pthread_mutex_lock(&region_lock);
	bool imported = device->regions->imported != 0;
	pthread_mutex_unlock(&region_lock);
	return imported;
}

void region_classes(struct device *device, uint64_t resident[CLASSES])
{
	pthread_mutex_lock(&region_lock);
	memcpy(resident, device->regions->resident, sizeof(device->regions->resident));
	pthread_mutex_unlock(&region_lock);
}

LIFE(.stage = LIFE_REGIONS, .set_up = set_up, .context_gone = context_gone, .forget = forget);
