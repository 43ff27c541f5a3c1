// SPDX-License-Identifier: Apache-2.0
#include "region.h"

#include "backing.h"
#include "chunk.h"
#include "lent.h"
#include "life.h"
#include "log.h"
#include "packed.h"
#include "pages.h"
#include "quiet.h"
#include "small.h"
#include "tree.h"
#include "turn.h"
#include "view.h"

#include <stdlib.h>
#include <string.h>

/* Size below which allocations share a chunk, bytes. */
#define SMALL_BELOW GG_MIB

bool region_look(CUdeviceptr address)
{
	if (!pages_near(address))
		return false;
	turn_look();
	return true;
}

bool region_about(CUdeviceptr address, struct region_about *about)
{
	struct region *region;
	uint64_t offset, start, bytes;
	bool found = false;

	if (!pages_near(address))
		return false;
	pthread_mutex_lock(&tree_lock);
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
	pthread_mutex_unlock(&tree_lock);
	return found;
}

/* Fix the memory of chunks that another process knows (ipc.h): no other memory may replace it. With the lock held. */
static void name_chunks(struct region *region, size_t offset, size_t bytes)
{
	const size_t last = chunk_at(region, offset + bytes - 1);

	for (size_t i = chunk_at(region, offset); i <= last && i < region->chunks; i++)
		region->chunk[i].shareable = true;
}

bool region_given(CUdeviceptr address, size_t bytes, int fd)
{
	struct region_about about;
	struct region *region;
	bool lent;

	if (!region_about(address, &about))
		return false;
	lent = lent_give(LENT_REGION(about.region.serial), fd);
	pthread_mutex_lock(&tree_lock);
	region = pages_region(address);
	if (region && region->serial == about.region.serial) {
		region->lent |= lent;
		name_chunks(region, address - region->address, bytes ? bytes : 1);
	}
	pthread_mutex_unlock(&tree_lock);
	return true;
}

size_t region_piece(CUdeviceptr address)
{
	const struct region *region;
	size_t piece = 0, offset, index;

	if (!pages_near(address))
		return 0;
	pthread_mutex_lock(&tree_lock);
	region = pages_region(address);
	if (region) {
		offset = address - region->address;
		index = chunk_at(region, offset);
		piece = chunk_offset(region, index) + chunk_bytes(region, index) - offset;
	}
	pthread_mutex_unlock(&tree_lock);
	return piece;
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

/* Mark a region that is about to be freed. With the lock held. */
static void begin_to_free(struct region *region)
{
	region->freeing = true;
	region->device->regions->frees++;
}

/* Unmap and free a region marked as `freeing`. An error leaves it as it was. */
static CUresult destroy(struct region *region)
{
	struct region_tree *tree = region->device->regions;
	const bool unmapped = backing_unmap(region);
	bool bound = false;

	if (unmapped) {
		pthread_mutex_lock(&tree_lock);
		tree_remove(region);
		pthread_mutex_unlock(&tree_lock);
		backing_unreserve(region);
		pthread_mutex_lock(&tree_lock);
		bound = region->gone = region->bound;
		pthread_mutex_unlock(&tree_lock);
		if (!bound)
			backing_give(region);
	}
	pthread_mutex_lock(&tree_lock);
	if (!unmapped)
		region->freeing = false;
	tree->frees--;
	pthread_mutex_unlock(&tree_lock);
	return unmapped ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

void region_unbind(struct region *region)
{
	pthread_mutex_lock(&tree_lock);
	const bool last = !--region->bound && region->gone;
	pthread_mutex_unlock(&tree_lock);
	if (last)
		backing_give(region);
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

/* Wait until the mover is done with a region. With the lock held, which is released meanwhile: no other thread may be
 * able to free `region`. */
static void wait_idle(struct region *region)
{
	while (any_busy(region))
		tree_await(region->device);
}

CUresult region_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	if (bytes < SMALL_BELOW && alignment <= SMALL_MAX)
		return packed_alloc(device, bytes, alignment, address);
	return alloc_large(device, bytes, alignment, address);
}

/* The wait for other GPUs that use what is about to be freed. */
struct users {
	const struct device *owner;
	uint64_t which;		/* a bit an ordinal */
};

static void drain_user(struct device *device, void *argument)
{
	const struct users *users = argument;
	CUresult ignored;

	if (device != users->owner && device->quiet && users->which >> device->ordinal & 1) {
		ignored = quiet_drain(device);	/* its errors are for the threads that work there */
		(void)ignored;
	}
}

CUresult region_drain(struct device *device, CUdeviceptr address)
{
	struct users users = { device, view_users_at(address) };
	const CUresult result = quiet_drain(device);

	if (result == CUDA_SUCCESS)
		device_each(drain_user, &users);
	return result;
}

CUresult region_free(CUdeviceptr address)
{
	struct region *region;
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	bool empty = false;

	if (!pages_near(address))
		return result;
	pthread_mutex_lock(&tree_lock);
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
	pthread_mutex_unlock(&tree_lock);
	if (!region)
		return result;
	result = destroy(region);
	if (result != CUDA_SUCCESS && region->small) {
		/* It stays, empty, to be used again. */
		pthread_mutex_lock(&tree_lock);
		packed_enter(region);
		pthread_mutex_unlock(&tree_lock);
		result = CUDA_SUCCESS;
	}
	return result;
}

/* Return the next region of a context that is gone, marked to be freed. */
static struct region *next_gone(struct device *device, CUcontext context)
{
	struct region *first, *region, *found = NULL;

	pthread_mutex_lock(&tree_lock);
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
	pthread_mutex_unlock(&tree_lock);
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
			pthread_mutex_lock(&tree_lock);
			region->freeing = true;
			pthread_mutex_unlock(&tree_lock);
		}
}

LIFE(.stage = LIFE_REGIONS, .context_gone = context_gone);
