// SPDX-License-Identifier: Apache-2.0
#include "packed.h"

#include "backing.h"
#include "driver.h"
#include "small.h"
#include "tree.h"

/* With the lock held. */
static bool take_small(struct device *device, CUcontext context, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	const int order = (int)small_order(bytes, alignment);
	uint64_t offset;

	for (struct region *region = device->regions->small; region; region = region->next_small) {
		if (region->context != context || region->freeing || small_largest(region->small) < order ||
		    !small_alloc(region->small, bytes, alignment, tree_serials + 1, &offset))
			continue;
		tree_serials++;
		*address = region->address + offset;
		return true;
	}
	return false;
}

void packed_enter(struct region *region)
{
	region->next_small = region->device->regions->small;
	region->device->regions->small = region;
}

CUresult packed_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	struct region *region;
	CUcontext context = NULL;
	CUresult result;
	bool found;

	real.cuCtxGetCurrent(&context);
	pthread_mutex_lock(&tree_lock);
	found = take_small(device, context, bytes, alignment, address);
	pthread_mutex_unlock(&tree_lock);
	if (found)
		return CUDA_SUCCESS;
	result = backing_make(device, GG_CHUNK, 0, &region);
	if (result != CUDA_SUCCESS)
		return result;
	region->small = small_new();
	if (!region->small || !tree_insert(region)) {
		if (backing_unmap(region))
			backing_return(region);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&tree_lock);
	packed_enter(region);
	found = take_small(device, context, bytes, alignment, address);
	pthread_mutex_unlock(&tree_lock);
	return found ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Return whether another region for small allocations is entirely free, as one is kept. With the lock held. */
static bool another_empty(const struct region *region)
{
	for (struct region *at = region->device->regions->small; at; at = at->next_small)
		if (at != region && at->context == region->context && !at->freeing &&
		    small_largest(at->small) == SMALL_ORDERS)
			return true;
	return false;
}

void packed_leave(struct region *region)
{
	struct region **at = &region->device->regions->small;

	while (*at && *at != region)
		at = &(*at)->next_small;
	if (*at)
		*at = region->next_small;
}

bool packed_free(struct region *region, uint64_t offset, bool *empty)
{
	if (!small_free(region->small, offset))
		return false;
	*empty = small_largest(region->small) >= SMALL_ORDERS && another_empty(region);
	if (*empty)
		packed_leave(region);
	return true;
}
