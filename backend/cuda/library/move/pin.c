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

/* Find the first region with a serial above `after`: a walk that survives regions that come and go. */
static bool next_region(struct device *device, uint64_t after, uint64_t *serial, CUdeviceptr *address, size_t *bytes)
{
	struct region *first, *region, *found = NULL;

	pthread_mutex_lock(&tree_lock);
	first = region = device->regions->ring;
	while (region) {
		if (region->serial > after && !region->freeing && !region->object &&
		    (!found || region->serial < found->serial))
			found = region;
		region = region->next == first ? NULL : region->next;
	}
	if (found) {
		*serial = found->serial;
		*address = found->address;
		*bytes = found->reserved;
	}
	pthread_mutex_unlock(&tree_lock);
	return found;
}

static bool still(CUdeviceptr address, uint64_t serial)
{
	pthread_mutex_lock(&tree_lock);
	struct region *region = pages_region(address);
	bool found = region && region->serial == serial && !region->freeing;
	pthread_mutex_unlock(&tree_lock);
	return found;
}

CUresult pin_peer(struct device *device, CUdevice peer)
{
	struct region_tree *tree = device->regions;
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = peer },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult result = CUDA_SUCCESS;
	uint64_t serial = 0;
	CUdeviceptr address;
	size_t bytes, number = 0;
	bool done;

	/* Listed first: allocations made meanwhile are opened to it as well. */
	pthread_mutex_lock(&tree_lock);
	while (number < tree->peer_count && tree->peers[number] != peer)
		number++;
	if (number == tree->peer_count && number < GG_DEVICES - 1)
		tree->peers[tree->peer_count++] = peer;
	done = tree->peers_done >> number & 1;
	pthread_mutex_unlock(&tree_lock);
	if (done)
		return CUDA_SUCCESS;
	while (next_region(device, serial, &serial, &address, &bytes) && result == CUDA_SUCCESS) {
		result = stay(address, bytes, false);
		if (result == CUDA_SUCCESS)
			CALL_REAL(result, cuMemSetAccess, (address, bytes, &access, 1));
		/* It was freed meanwhile. */
		if (result == CUDA_ERROR_INVALID_VALUE && !still(address, serial))
			result = CUDA_SUCCESS;
	}
	/* After an error the next call does it again. */
	pthread_mutex_lock(&tree_lock);
	if (result == CUDA_SUCCESS && number < tree->peer_count)
		tree->peers_done |= UINT64_C(1) << number;
	pthread_mutex_unlock(&tree_lock);
	return result;
}
