// SPDX-License-Identifier: Apache-2.0
#include "peer.h"

#include <time.h>

#include "batch.h"
#include "chunk.h"
#include "driver.h"
#include "pages.h"
#include "place.h"
#include "tree.h"

/* For how long what is on its way is waited for: times, and ns between two. */
#define TRIES 1000
#define LOOK_NS 5000000

/* The first region with a serial above `after`: a walk that survives regions that come and go. */
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

/* Nothing of the device moves from here until it is let go of; false: something still does. */
static bool hold_still(struct device *device)
{
	const struct timespec moment = { .tv_nsec = LOOK_NS };

	if (!device->mover)
		return true;
	for (int try = 0; try < TRIES; try++) {
		pthread_mutex_lock(&device->mover->lock);
		if (batch_reap(device))
			return true;
		pthread_mutex_unlock(&device->mover->lock);
		nanosleep(&moment, NULL);
	}
	return false;
}

static void let_go(struct device *device)
{
	if (device->mover)
		pthread_mutex_unlock(&device->mover->lock);
}

/* Chunk by chunk: some may be in the host, and one call is for memory of one kind. */
static CUresult give_region(CUdeviceptr address, uint64_t serial, const CUmemAccessDesc *access)
{
	CUresult result = CUDA_SUCCESS;
	uint64_t done = 0, bytes;

	for (;;) {
		pthread_mutex_lock(&tree_lock);
		const struct region *region = pages_region(address);
		const bool more = region && region->serial == serial && !region->freeing && done < region->reserved;

		/* What is bare gets it when it is mapped. */
		const bool is_bare = more && place_is_bare(region, chunk_at(region, done));

		bytes = more ? chunk_bytes(region, chunk_at(region, done)) : 0;
		pthread_mutex_unlock(&tree_lock);
		if (!more)
			return CUDA_SUCCESS;
		if (!is_bare)
			CALL_REAL(result, cuMemSetAccess, (address + done, bytes, access, 1));
		/* It was freed meanwhile. */
		if (result != CUDA_SUCCESS)
			return result == CUDA_ERROR_INVALID_VALUE && !still(address, serial) ? CUDA_SUCCESS : result;
		done += bytes;
	}
}

CUresult peer_give(struct device *device, CUdevice peer)
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

	/* Said first: what is allocated, or moves, meanwhile is given to it as well. */
	pthread_mutex_lock(&tree_lock);
	while (number < tree->peer_count && tree->peers[number] != peer)
		number++;
	if (number == tree->peer_count && number < GG_DEVICES - 1)
		tree->peers[tree->peer_count++] = peer;
	__atomic_or_fetch(&tree->users, UINT64_C(1) << peer, __ATOMIC_RELEASE);
	done = tree->peers_done >> number & 1;
	pthread_mutex_unlock(&tree_lock);
	if (done)
		return CUDA_SUCCESS;
	if (!hold_still(device))
		return CUDA_ERROR_NOT_READY;
	while (next_region(device, serial, &serial, &address, &bytes) && result == CUDA_SUCCESS)
		result = give_region(address, serial, &access);
	let_go(device);
	/* After an error it is done again by the next call, and not taken for done. */
	pthread_mutex_lock(&tree_lock);
	if (result == CUDA_SUCCESS && number < tree->peer_count)
		tree->peers_done |= UINT64_C(1) << number;
	pthread_mutex_unlock(&tree_lock);
	return result;
}
