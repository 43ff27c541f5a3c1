// SPDX-License-Identifier: Apache-2.0
#include "backing.h"

#include <stdlib.h>
#include <string.h>

#include "chunk.h"
#include "clean.h"
#include "daemon.h"
#include "driver.h"
#include "host.h"
#include "kept.h"
#include "lent.h"
#include "log.h"
#include "place.h"
#include "pool.h"
#include "small.h"
#include "tree.h"

/* Region sizes from which chunks of a class are used; smaller regions would leave most of such a chunk unused. */
#define LARGE_FROM (1024 * GG_MIB)
#define MIDDLE_FROM (16 * GG_MIB)
/* Attempts to undo something. */
#define TRIES 3

struct region *backing_plan(struct device *device, size_t bytes)
{
	size_t reserved = (bytes + GG_CHUNK - 1) & ~(size_t)(GG_CHUNK - 1), rest = reserved, chunks = 0;
	size_t count[CLASSES] = { 0 };
	struct region *region;

	for (enum chunk_class class = 0; class < CLASSES; class++) {
		if ((class == CLASS_LARGE && reserved < LARGE_FROM) ||
		    (class == CLASS_MIDDLE && reserved < MIDDLE_FROM))
			continue;
		count[class] = rest / class_bytes[class];
		chunks += count[class];
		rest %= class_bytes[class];
	}
	region = calloc(1, sizeof(*region) + chunks * sizeof(region->chunk[0]));
	if (!region)
		return NULL;
	region->device = device;
	region->bytes = bytes;
	region->reserved = reserved;
	memcpy(region->count, count, sizeof(count));
	region->chunks = chunks;
	return region;
}

/* Unmaps the first `mapped` bytes; false: they are still mapped. */
static bool unmap(const struct region *region, size_t mapped)
{
	CUresult result = mapped ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;

	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemUnmap, (region->address, mapped));
	return result == CUDA_SUCCESS;
}

void backing_unreserve(const struct region *region)
{
	CUresult result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemAddressFree, (region->address, region->reserved));
	if (result != CUDA_SUCCESS)
		log_line("cuMemAddressFree failed with %d", result);
}

/* Maps the chunks at the region's addresses: all or nothing. */
static CUresult map(struct region *region, size_t alignment)
{
	CUmemAccessDesc access[GG_DEVICES];
	size_t mapped = 0, count;
	CUresult result;

	CALL_REAL(result, cuMemAddressReserve,
		  (&region->address, region->reserved, alignment > GG_CHUNK ? alignment : 0, 0, 0));
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < region->chunks && result == CUDA_SUCCESS; i++) {
		CALL_REAL(result, cuMemMap,
			  (region->address + mapped, chunk_bytes(region, i), 0, region->chunk[i].memory, 0));
		if (result == CUDA_SUCCESS)
			mapped += chunk_bytes(region, i);
	}
	if (result == CUDA_SUCCESS) {
		pthread_mutex_lock(&tree_lock);
		count = tree_access(region, access);
		pthread_mutex_unlock(&tree_lock);
		CALL_REAL(result, cuMemSetAccess, (region->address, region->reserved, access, count));
	}
	if (result == CUDA_SUCCESS)
		return CUDA_SUCCESS;
	if (unmap(region, mapped))
		backing_unreserve(region);
	return result;
}

static CUresult back(struct region *region, size_t alignment)
{
	struct device *device = region->device;
	CUresult result = CUDA_SUCCESS;
	uint64_t missing = 0;
	size_t made;

	/* Kept chunks are charged already. */
	for (size_t i = 0; i < region->chunks; i++)
		if (!pool_cached(device, chunk_class(region, i), &region->chunk[i].memory))
			missing += chunk_bytes(region, i);
	if (missing && daemon_charge(device, missing)) {
		missing = 0;
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	__atomic_add_fetch(&device->resident, missing, __ATOMIC_RELAXED);
	for (made = 0; made < region->chunks && result == CUDA_SUCCESS; made++) {
		struct chunk *chunk = &region->chunk[made];

		if (chunk->memory)
			continue;
		result = pool_create(device, chunk_class(region, made), &chunk->memory);
		if (result == CUDA_SUCCESS)
			missing -= chunk_bytes(region, made);
		else
			chunk->memory = 0;
	}
	if (result == CUDA_SUCCESS)
		result = map(region, alignment);
	if (result == CUDA_SUCCESS)
		return CUDA_SUCCESS;
	pool_uncharge(device, missing);	/* for chunks that were not made */
	for (size_t i = 0; i < region->chunks; i++)
		if (region->chunk[i].memory)
			pool_give(device, chunk_class(region, i), region->chunk[i].memory);
	return result;
}

CUresult backing_make(struct device *device, size_t bytes, size_t alignment, struct region **made)
{
	struct region *region = backing_plan(device, bytes);
	CUresult result;

	if (!region)
		return CUDA_ERROR_OUT_OF_MEMORY;
	real.cuCtxGetCurrent(&region->context);
	result = back(region, alignment);
	if (result != CUDA_SUCCESS) {
		free(region);
		return result;
	}
	*made = region;
	return CUDA_SUCCESS;
}

bool backing_unmap(struct region *region)
{
	return place_leave_region(region);
}

void backing_return(struct region *region)
{
	backing_unreserve(region);
	backing_give(region);
}

/* Whether other processes may have the chunk by a descriptor: true if the driver has it as a whole, or it was named to
 * others. */
static bool may_be_lent(const struct chunk *chunk)
{
	return !chunk->memory || (chunk->reached && chunk->place == CHUNK_DEVICE);
}

/* Whether it stays charged because other processes keep it alive. */
static bool is_lent(const struct region *region)
{
	uint64_t bytes = 0;

	for (size_t i = 0; region->lent && i < region->chunks; i++)
		bytes += may_be_lent(&region->chunk[i]) ? chunk_bytes(region, i) : 0;
	return bytes && lent_keep(region->device, LENT_REGION(region->serial), bytes);
}

void backing_give(struct region *region)
{
	struct device *device = region->device;
	const bool lent = is_lent(region);
	int64_t pinned = 0;

	for (size_t i = 0; i < region->chunks; i++) {
		struct chunk *chunk = &region->chunk[i];
		enum chunk_class class = chunk_class(region, i);

		if (chunk->pinned)
			pinned += (int64_t)class_bytes[class];
		if (lent && may_be_lent(chunk)) {
			if (chunk->memory)
				kept_release(device, chunk->memory);
			continue;
		}
		if (!chunk->memory) {	/* the driver has freed it as a whole */
			pool_uncharge(device, class_bytes[class]);
			continue;
		}
		clean_forget(region, i);
		if (chunk->place == CHUNK_DEVICE) {
			(chunk->shareable || chunk->imported || chunk->reached ?
				 pool_drop : pool_give)(device, class, chunk->memory);
			continue;
		}
		(chunk->imported ? host_drop :
				   host_give)(device, class, (struct spare){ chunk->memory, chunk->window });
		pool_uncharge_swapped(device, class_bytes[class]);
	}
	tree_report_pinned(device, -pinned);
	small_delete(region->small);
	free(region);
}
