// SPDX-License-Identifier: Apache-2.0
#include "region.h"

#include "daemon.h"
#include "driver.h"
#include "mover.h"
#include "small.h"
#include "tree.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A region takes chunks of a class from this size on; below, they would hold memory that hardly anybody uses. */
#define LARGE_FROM (1024 * GG_MIB)
#define MIDDLE_FROM (16 * GG_MIB)
/* Below it, allocations share a chunk. */
#define SMALL_BELOW GG_MIB
/* What undoes something is tried so often. */
#define TRIES 3
/* How often to look whether the GPU has come to an old copy. */
#define LOOK_NS 5000000

pthread_mutex_t region_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;	/* something is no longer busy */
static uint64_t serials;

CUresult region_setup(struct device *device)
{
	device->regions = calloc(1, sizeof(*device->regions));
	return device->regions ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void region_forget(void)
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

size_t region_access(const struct region *region, CUmemAccessDesc *access)
{
	const struct region_tree *tree = region->device->regions;
	const CUmemAccessDesc of = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE }, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	size_t count = 0;

	access[count] = of;
	access[count++].location.id = region->device->ordinal;
	for (size_t i = 0; i < tree->peer_count && count < GG_DEVICES; i++) {
		access[count] = of;
		access[count++].location.id = tree->peers[i];
	}
	return count;
}

/* Making one */

static struct region *plan(struct device *device, size_t bytes)
{
	size_t reserved = (bytes + GG_CHUNK - 1) & ~(size_t)(GG_CHUNK - 1), rest = reserved, chunks = 0;
	size_t count[CLASSES] = { 0 };
	struct region *region;

	for (enum chunk_class class = 0; class < CLASSES; class++) {
		if ((class == CLASS_LARGE && reserved < LARGE_FROM) || (class == CLASS_MIDDLE && reserved < MIDDLE_FROM))
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

static void unreserve(const struct region *region)
{
	CUresult result = CUDA_ERROR_UNKNOWN;

	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemAddressFree, (region->address, region->reserved));
	if (result != CUDA_SUCCESS)
		state_log("cuMemAddressFree failed with %d", result);
}

/* Addresses with the chunks behind them. All or nothing. */
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
		pthread_mutex_lock(&region_lock);
		count = region_access(region, access);
		pthread_mutex_unlock(&region_lock);
		CALL_REAL(result, cuMemSetAccess, (region->address, region->reserved, access, count));
	}
	if (result == CUDA_SUCCESS)
		return CUDA_SUCCESS;
	if (unmap(region, mapped))
		unreserve(region);
	return result;
}

static CUresult back(struct region *region, size_t alignment)
{
	struct device *device = region->device;
	CUresult result = CUDA_SUCCESS;
	uint64_t missing = 0;
	size_t made;

	/* What is kept is charged already. */
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
	pool_uncharge(device, missing);	/* what was not made */
	for (size_t i = 0; i < region->chunks; i++)
		if (region->chunk[i].memory)
			pool_give(device, chunk_class(region, i), region->chunk[i].memory);
	return result;
}

/* With the lock. */
static void count(const struct region *region, int sign)
{
	struct region_tree *tree = region->device->regions;

	for (size_t i = 0; i < region->chunks; i++) {
		if (region->chunk[i].place == CHUNK_DEVICE)
			tree->resident[chunk_class(region, i)] += sign * chunk_bytes(region, i);
		if (region->chunk[i].pinned)
			tree->pinned += sign * chunk_bytes(region, i);
	}
}

/* What is pinned changed by so much. */
static void report(struct device *device, int64_t change)
{
	if (!change)
		return;
	__atomic_add_fetch(&device->foreign, (uint64_t)change, __ATOMIC_RELAXED);
	daemon_report(device);
}

static bool insert(struct region *region)
{
	struct region_tree *tree = region->device->regions;
	uint64_t resident[CLASSES];
	bool inserted, pinned;

	pthread_mutex_lock(&region_lock);
	inserted = pages_ready(region);
	pinned = tree->peer_count != 0;
	if (inserted) {
		region->serial = ++serials;
		for (size_t i = 0; i < region->chunks; i++)
			region->chunk[i].pinned = pinned;
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
		report(region->device, (int64_t)region->reserved);
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

/* Gives back what is behind a region that nobody can find any more, and is mapped nowhere. */
static void give_back(struct region *region)
{
	struct device *device = region->device;
	int64_t pinned = 0;

	for (size_t i = 0; i < region->chunks; i++) {
		struct chunk *chunk = &region->chunk[i];
		enum chunk_class class = chunk_class(region, i);

		if (chunk->pinned)
			pinned += (int64_t)class_bytes[class];
		if (chunk->place == CHUNK_DEVICE) {
			pool_give(device, class, chunk->memory);
			continue;
		}
		pool_host_give(device, class, (struct spare){ chunk->memory, chunk->window });
		pool_uncharge_swapped(device, class_bytes[class]);
	}
	report(device, -pinned);
	small_delete(region->small);
	free(region);
}

/* Unmaps and frees one that is marked as `freeing`. An error leaves it as it was. */
static CUresult destroy(struct region *region)
{
	if (!unmap(region, region->reserved)) {
		pthread_mutex_lock(&region_lock);
		region->freeing = false;
		pthread_mutex_unlock(&region_lock);
		return CUDA_ERROR_UNKNOWN;
	}
	pthread_mutex_lock(&region_lock);
	remove_region(region);
	pthread_mutex_unlock(&region_lock);
	unreserve(region);
	give_back(region);
	return CUDA_SUCCESS;
}

static CUresult make(struct device *device, size_t bytes, size_t alignment, struct region **made)
{
	struct region *region = plan(device, bytes);
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

static CUresult alloc_large(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	struct region *region;
	CUresult result = make(device, bytes, alignment, &region);

	if (result != CUDA_SUCCESS)
		return result;
	*address = region->address;
	if (insert(region))
		return CUDA_SUCCESS;
	if (unmap(region, region->reserved))
		unreserve(region);
	give_back(region);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Small ones */

/* With the lock. */
static bool take_small(struct device *device, CUcontext context, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	const int order = (int)small_order(bytes, alignment);
	uint64_t offset;

	for (struct region *region = device->regions->small; region; region = region->next_small) {
		if (region->context != context || region->freeing || small_largest(region->small) < order ||
		    !small_alloc(region->small, bytes, alignment, serials + 1, &offset))
			continue;
		serials++;
		*address = region->address + offset;
		return true;
	}
	return false;
}

static CUresult alloc_small(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	struct region *region;
	CUcontext context = NULL;
	CUresult result;
	bool found;

	real.cuCtxGetCurrent(&context);
	pthread_mutex_lock(&region_lock);
	found = take_small(device, context, bytes, alignment, address);
	pthread_mutex_unlock(&region_lock);
	if (found)
		return CUDA_SUCCESS;
	result = make(device, GG_CHUNK, 0, &region);
	if (result != CUDA_SUCCESS)
		return result;
	region->small = small_new();
	if (!region->small || !insert(region)) {
		if (unmap(region, region->reserved))
			unreserve(region);
		give_back(region);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&region_lock);
	region->next_small = device->regions->small;
	device->regions->small = region;
	found = take_small(device, context, bytes, alignment, address);
	pthread_mutex_unlock(&region_lock);
	return found ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Whether another one for small allocations is all free: one is kept. With the lock. */
static bool another_empty(const struct region *region)
{
	for (struct region *at = region->device->regions->small; at; at = at->next_small)
		if (at != region && at->context == region->context && !at->freeing &&
		    small_largest(at->small) == SMALL_ORDERS)
			return true;
	return false;
}

/* With the lock. */
static void remove_small(struct region *region)
{
	struct region **at = &region->device->regions->small;

	while (*at && *at != region)
		at = &(*at)->next_small;
	if (*at)
		*at = region->next_small;
}

static bool any_busy(const struct region *region)
{
	for (size_t i = 0; i < region->chunks; i++)
		if (region->chunk[i].busy)
			return true;
	return false;
}

/* Waits until the mover is done with it. With the lock, which is let go meanwhile: `region` may only be one that cannot be
 * freed by anybody else. */
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
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += LOOK_NS;
		if (until.tv_nsec >= 1000000000) {
			until.tv_nsec -= 1000000000;
			until.tv_sec++;
		}
		pthread_cond_timedwait(&idle, &region_lock, &until);
	}
}

CUresult region_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address)
{
	if (bytes < SMALL_BELOW && alignment <= SMALL_MAX)
		return alloc_small(device, bytes, alignment, address);
	return alloc_large(device, bytes, alignment, address);
}

CUresult region_free(CUdeviceptr address)
{
	struct region *region;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	if (!region_near(address))
		return result;
	pthread_mutex_lock(&region_lock);
	region = pages_region(address);
	if (region && region->small && !region->freeing && small_free(region->small, address - region->address)) {
		result = CUDA_SUCCESS;
		if (small_largest(region->small) < SMALL_ORDERS || !another_empty(region))
			region = NULL;	/* stays */
		else
			remove_small(region);
	} else if (region && (region->small || region->freeing || region->address != address)) {
		region = NULL;
	}
	if (region) {
		region->freeing = true;
		wait_idle(region);
	}
	pthread_mutex_unlock(&region_lock);
	if (!region)
		return result;
	result = destroy(region);
	if (result != CUDA_SUCCESS && region->small) {
		/* It is empty and stays, to be used again. */
		pthread_mutex_lock(&region_lock);
		region->next_small = region->device->regions->small;
		region->device->regions->small = region;
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
		found->freeing = true;
		if (found->small)
			remove_small(found);
		wait_idle(found);
	}
	pthread_mutex_unlock(&region_lock);
	return found;
}

void region_context_gone(struct device *device, CUcontext context)
{
	struct region *region;

	while ((region = next_gone(device, context)))
		if (destroy(region) != CUDA_SUCCESS) {
			state_log("device %d: an allocation of a context that is gone stays", device->ordinal);
			pthread_mutex_lock(&region_lock);
			region->freeing = true;
			pthread_mutex_unlock(&region_lock);
		}
}

/* What stays where it is */

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
	report(device, change);
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

void region_put(const struct pick *picks, size_t count)
{
	pthread_mutex_lock(&region_lock);
	for (size_t i = 0; i < count; i++)
		picks[i].region->chunk[picks[i].index].busy = false;
	pthread_cond_broadcast(&idle);
	pthread_mutex_unlock(&region_lock);
}

/* A chunk has moved: what is behind it now. It is busy. */
void region_moved(const struct pick *pick, enum chunk_place place, CUmemGenericAllocationHandle memory, CUdeviceptr window)
{
	struct chunk *chunk = &pick->region->chunk[pick->index];
	const size_t bytes = chunk_bytes(pick->region, pick->index);
	struct region_tree *tree = pick->region->device->regions;

	pthread_mutex_lock(&region_lock);
	if (chunk->place != place)
		tree->resident[chunk_class(pick->region, pick->index)] += place == CHUNK_DEVICE ? bytes : -bytes;
	chunk->memory = memory;
	chunk->place = place;
	chunk->window = window;
	pthread_mutex_unlock(&region_lock);
}

void region_classes(struct device *device, uint64_t resident[CLASSES])
{
	pthread_mutex_lock(&region_lock);
	memcpy(resident, device->regions->resident, sizeof(device->regions->resident));
	pthread_mutex_unlock(&region_lock);
}
