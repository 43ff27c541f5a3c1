// SPDX-License-Identifier: Apache-2.0
/* What stays where it is: exported, or used by another GPU. */
#include "tree.h"

#include "daemon.h"
#include "driver.h"
#include "mover.h"

void pinned_report(struct device *device, int64_t change)
{
	if (!change)
		return;
	__atomic_add_fetch(&device->foreign, (uint64_t)change, __ATOMIC_RELAXED);
	daemon_report(device);
}

size_t region_access(const struct region *region, CUmemAccessDesc *access)
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

CUresult region_pin(CUdeviceptr address, size_t bytes)
{
	struct region *region;
	struct device *device;
	size_t first, last;
	int64_t change = 0;
	bool host = false;
	CUresult result;

	pthread_mutex_lock(&region_lock);
	region = pages_region(address);
	if (!region || region->freeing) {
		pthread_mutex_unlock(&region_lock);
		return CUDA_ERROR_INVALID_VALUE;
	}
	device = region->device;
	first = chunk_at(region, address - region->address);
	last = chunk_at(region, address - region->address + (bytes ? bytes - 1 : 0));
	for (size_t i = first; i <= last && i < region->chunks; i++) {
		host |= region->chunk[i].place == CHUNK_HOST || region->chunk[i].busy;
		if (region->chunk[i].pinned)
			continue;
		region->chunk[i].pinned = true;
		change += (int64_t)chunk_bytes(region, i);
	}
	device->regions->pinned += (uint64_t)change;
	pthread_mutex_unlock(&region_lock);
	pinned_report(device, change);
	result = host ? mover_fetch(device, address, bytes) : CUDA_SUCCESS;
	return result;
}

uint64_t region_pinned(struct device *device)
{
	pthread_mutex_lock(&region_lock);
	uint64_t bytes = device->regions->pinned;
	pthread_mutex_unlock(&region_lock);
	return bytes;
}

/* The first region with a serial above `after`: a walk that survives regions that come and go. */
static bool next_region(struct device *device, uint64_t after, uint64_t *serial, CUdeviceptr *address, size_t *bytes)
{
	struct region *first, *region, *found = NULL;

	pthread_mutex_lock(&region_lock);
	first = region = device->regions->ring;
	while (region) {
		if (region->serial > after && !region->freeing && (!found || region->serial < found->serial))
			found = region;
		region = region->next == first ? NULL : region->next;
	}
	if (found) {
		*serial = found->serial;
		*address = found->address;
		*bytes = found->reserved;
	}
	pthread_mutex_unlock(&region_lock);
	return found;
}

static bool still(CUdeviceptr address, uint64_t serial)
{
	pthread_mutex_lock(&region_lock);
	struct region *region = pages_region(address);
	bool found = region && region->serial == serial && !region->freeing;
	pthread_mutex_unlock(&region_lock);
	return found;
}

CUresult region_peer(struct device *device, CUdevice peer)
{
	struct region_tree *tree = device->regions;
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = peer },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUresult result = CUDA_SUCCESS;
	uint64_t serial = 0;
	CUdeviceptr address;
	size_t bytes;
	bool known = false;

	pthread_mutex_lock(&region_lock);
	for (size_t i = 0; i < tree->peer_count; i++)
		known |= tree->peers[i] == peer;
	if (!known && tree->peer_count < GG_DEVICES - 1)
		tree->peers[tree->peer_count++] = peer;
	pthread_mutex_unlock(&region_lock);
	if (known)
		return CUDA_SUCCESS;
	while (next_region(device, serial, &serial, &address, &bytes) && result == CUDA_SUCCESS) {
		result = region_pin(address, bytes);
		if (result == CUDA_SUCCESS)
			CALL_REAL(result, cuMemSetAccess, (address, bytes, &access, 1));
		/* It was freed meanwhile. */
		if (result == CUDA_ERROR_INVALID_VALUE && !still(address, serial))
			result = CUDA_SUCCESS;
	}
	return result;
}
