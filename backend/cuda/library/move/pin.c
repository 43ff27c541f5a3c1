// SPDX-License-Identifier: Apache-2.0
#include "pin.h"

#include "chunk.h"
#include "driver.h"
#include "join.h"
#include "mover.h"
#include "object.h"
#include "pages.h"
#include "tree.h"
#include "view.h"

/* Pin a range. `reached`: something outside of the program can reach it. */
static CUresult stay(CUdeviceptr address, size_t bytes, bool reached)
{
	struct region *region;
	struct device *device;
	size_t first, last;
	int64_t change = 0;
	bool host = false;
	CUresult result;

	pthread_mutex_lock(&tree_lock);
	region = pages_region(address);
	if (!region || region->freeing) {
		pthread_mutex_unlock(&tree_lock);
		return CUDA_ERROR_INVALID_VALUE;
	}
	device = region->device;
	first = chunk_at(region, address - region->address);
	last = chunk_at(region, address - region->address + (bytes ? bytes - 1 : 0));
	for (size_t i = first; i <= last && i < region->chunks; i++) {
		region->chunk[i].reached |= reached;
		host |= region->chunk[i].place == CHUNK_HOST || region->chunk[i].busy;
		if (region->chunk[i].pinned)
			continue;
		region->chunk[i].pinned = true;
		change += (int64_t)chunk_bytes(region, i);
	}
	device->regions->pinned += (uint64_t)change;
	pthread_mutex_unlock(&tree_lock);
	tree_report_pinned(device, change);
	result = host ? mover_fetch(device, address, bytes) : CUDA_SUCCESS;
	return result;
}

CUresult pin_range(CUdeviceptr address, size_t bytes)
{
	return stay(address, bytes, true);
}

CUresult pin_whole(struct region *region)
{
	CUresult result = CUDA_SUCCESS;

	if (!object_is_whole(region))
		result = join_object(region);
	if (result == CUDA_SUCCESS)
		object_pin(region);
	return result;
}

CUresult pin_objects(CUdeviceptr address, size_t bytes)
{
	struct object_range range;
	CUresult result = CUDA_SUCCESS;

	if (!pages_near(address))
		return result;
	range = object_claim_range(address, bytes);
	if (range.failed)
		result = CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t i = 0; i < range.count && result == CUDA_SUCCESS; i++)
		result = pin_whole(range.views[i]->region);
	object_put_range(&range);
	return result;
}
