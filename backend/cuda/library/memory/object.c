// SPDX-License-Identifier: Apache-2.0
#include "object.h"

#include <stdlib.h>

#include "backing.h"
#include "daemon.h"
#include "driver.h"
#include "kept.h"
#include "life.h"
#include "names.h"
#include "outside.h"
#include "pages.h"
#include "pool.h"
#include "table.h"
#include "tree.h"
#include "view.h"

static struct table objects;	/* regions of objects, by name; under the lock of the tree */

bool object_can_move(const struct device *device, size_t bytes, const CUmemAllocationProp *prop,
		     unsigned long long flags)
{
	return device && device->elastic && bytes && bytes % GG_CHUNK == 0 && !flags &&
	       prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
	       !prop->allocFlags.compressionType && !prop->allocFlags.usage;
}

bool object_is(CUmemGenericAllocationHandle name)
{
	pthread_mutex_lock(&tree_lock);
	bool is = table_get(&objects, name) != NULL;
	pthread_mutex_unlock(&tree_lock);
	return is;
}

static bool trim(struct device *device)
{
	const CUstreamCaptureMode mode = driver_enter();
	const bool any = pool_trim(device, 0) != 0;

	driver_leave(mode);
	return any;
}

/* Have the driver make physical memory, charged. */
static CUresult make(struct device *device, size_t bytes, const CUmemAllocationProp *prop,
		     CUmemGenericAllocationHandle *whole)
{
	CUresult result;

	if (daemon_charge(device, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	__atomic_add_fetch(&device->resident, bytes, __ATOMIC_RELAXED);
	CALL_REAL(result, cuMemCreate, (whole, bytes, prop, 0));
	/* Memory kept for the next cuMemAlloc is in the way. */
	if (result == CUDA_ERROR_OUT_OF_MEMORY && trim(device))
		CALL_REAL(result, cuMemCreate, (whole, bytes, prop, 0));
	if (result != CUDA_SUCCESS)
		pool_uncharge(device, bytes);
	return result;
}

/* Count the movable memory of an object that is whole. With the lock held. */
static void count_intact(const struct region *region, int sign)
{
	uint64_t bytes = 0;

	for (size_t i = 0; region->object->whole && i < region->chunks; i++)
		bytes += region->chunk[i].pinned ? 0 : chunk_bytes(region, i);
	__atomic_add_fetch(&region->device->intact, sign * bytes, __ATOMIC_RELAXED);
}

static bool enter(struct region *region)
{
	struct object *object = region->object;
	bool entered;

	pthread_mutex_lock(&tree_lock);
	/* An object that has moved may have this value for its name. */
	if (table_get(&objects, object->name))
		object->name = names_next();
	entered = table_put(&objects, object->name, region);
	count_intact(region, 1);
	pthread_mutex_unlock(&tree_lock);
	if (entered && tree_insert(region))
		return true;
	pthread_mutex_lock(&tree_lock);
	count_intact(region, -1);
	if (entered)
		table_take(&objects, object->name);
	pthread_mutex_unlock(&tree_lock);
	return false;
}

CUresult object_create(struct device *device, size_t bytes, const CUmemAllocationProp *prop,
		       CUmemGenericAllocationHandle *name)
{
	CUmemGenericAllocationHandle whole;
	struct region *region = backing_plan(device, bytes);
	struct object *object = calloc(1, sizeof(*object));
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

	if (region && object)
		result = make(device, bytes, prop, &whole);
	if (result == CUDA_SUCCESS) {
		*object = (struct object){ .name = whole, .whole = whole, .held = 1, .prop = *prop };
		region->object = object;
		*name = whole;
		if (enter(region)) {
			/* Another thread cannot know it before it is returned. */
			*name = object->name;
			if (region->chunks > CHUNKS_TOGETHER)
				object_pin(region);
			return CUDA_SUCCESS;
		}
		kept_release(device, whole);
		pool_uncharge(device, bytes);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	free(object);
	free(region);
	return result;
}

/* Claiming. With the lock held. */

static bool is_idle(const struct region *region)
{
	for (size_t i = 0; i < region->chunks; i++)
		if (region->chunk[i].busy)
			return false;
	return !region->freeing;
}

static void set_busy(struct region *region, bool busy)
{
	region->object->claims = busy;
	for (size_t i = 0; i < region->chunks; i++)
		region->chunk[i].busy = busy;
}

static struct region *of_name(uint64_t name)
{
	return table_get(&objects, name);
}

static struct region *of_address(uint64_t address)
{
	struct view *view = view_at(address);

	return view ? view->region : NULL;
}

/* After each wait the object may be gone, or another one. */
static struct region *claim(struct region *(*find)(uint64_t), uint64_t key)
{
	struct region *region;

	pthread_mutex_lock(&tree_lock);
	while ((region = find(key)) && !is_idle(region))
		tree_await(region->device);
	if (region)
		set_busy(region, true);
	pthread_mutex_unlock(&tree_lock);
	return region;
}

struct region *object_claim(CUmemGenericAllocationHandle name)
{
	return claim(of_name, name);
}

struct region *object_claim_at(CUdeviceptr address)
{
	return pages_near(address) ? claim(of_address, address) : NULL;
}

void object_claim_again(struct region *region)
{
	pthread_mutex_lock(&tree_lock);
	region->object->claims++;
	pthread_mutex_unlock(&tree_lock);
}

/* Destroy an object that no thread can find any more: it is claimed, without a handle or a view, and not bound. */
static void destroy(struct region *region)
{
	const CUstreamCaptureMode mode = driver_enter();

	if (region->object->whole)
		kept_release(region->device, region->object->whole);
	backing_give(region);
	driver_leave(mode);
}

void object_put(struct region *region)
{
	struct object *object = region->object;

	pthread_mutex_lock(&tree_lock);
	if (--object->claims) {
		pthread_mutex_unlock(&tree_lock);
		return;
	}
	const bool dead = !object->held && !object->views && !region->bound;

	if (dead) {
		table_take(&objects, object->name);
		count_intact(region, -1);
		tree_remove(region);
		region->device->regions->frees++;
	} else {
		set_busy(region, false);
	}
	pthread_cond_broadcast(&tree_idle);
	pthread_mutex_unlock(&tree_lock);
	if (dead) {
		struct region_tree *tree = region->device->regions;

		destroy(region);
		pthread_mutex_lock(&tree_lock);
		tree->frees--;
		pthread_mutex_unlock(&tree_lock);
		free(object);
	}
}

void object_unbind(struct region *region)
{
	pthread_mutex_lock(&tree_lock);
	while (!is_idle(region))
		tree_await(region->device);
	set_busy(region, true);
	region->bound--;
	pthread_mutex_unlock(&tree_lock);
	object_put(region);
}

/* Collect the views in a range, into `range` if there is room for `most` of them. Returns a region that is not idle, or
 * NULL. With the lock held. */
static struct region *look(struct object_range *range, size_t most, CUdeviceptr address, size_t bytes)
{
	const CUdeviceptr end = address + bytes;
	struct region *waits = NULL;

	range->count = 0;
	range->parted = false;
	for (struct view *view = view_from(address); view && view->address < end; view = view_after(view)) {
		if (range->count < most)
			range->views[range->count] = view;
		range->count++;
		range->parted |= view->address < address || view->address + view->bytes > end;
		if (!is_idle(view->region))
			waits = view->region;
	}
	return waits;
}

struct object_range object_claim_range(CUdeviceptr address, size_t bytes)
{
	struct object_range range = { 0 };
	struct region *waits;
	size_t most = 0;

	pthread_mutex_lock(&tree_lock);
	while ((waits = look(&range, most, address, bytes)) || range.count > most) {
		struct view **bigger;

		if (waits) {
			tree_await(waits->device);
			continue;
		}
		bigger = realloc(range.views, range.count * sizeof(range.views[0]));
		if (!bigger) {
			range.failed = true;
			range.count = 0;
			break;
		}
		range.views = bigger;
		most = range.count;
	}
	for (size_t i = 0; i < range.count; i++)
		set_busy(range.views[i]->region, true);
	pthread_mutex_unlock(&tree_lock);
	return range;
}

static void put_range(struct object_range *range, bool unmapped)
{
	struct region *region;
	bool again;

	/* Once for each region: it may be gone after that. */
	for (size_t i = 0; i < range->count; i++) {
		region = range->views[i]->region;
		again = false;
		for (size_t k = i + 1; k < range->count && !again; k++)
			again = range->views[k]->region == region;
		if (unmapped)
			free(range->views[i]);
		if (!again)
			object_put(region);
	}
	free(range->views);
	*range = (struct object_range){ 0 };
}

void object_put_range(struct object_range *range)
{
	put_range(range, false);
}

void object_unmap_range(struct object_range *range)
{
	pthread_mutex_lock(&tree_lock);
	for (size_t i = 0; i < range->count; i++)
		view_hide(range->views[i]);
	pthread_mutex_unlock(&tree_lock);
}

void object_unmapped_range(struct object_range *range, bool unmapped)
{
	pthread_mutex_lock(&tree_lock);
	for (size_t i = 0; i < range->count; i++)
		(unmapped ? view_remove : view_show)(range->views[i]);
	pthread_mutex_unlock(&tree_lock);
	put_range(range, unmapped);
}

bool object_mapped(CUdeviceptr address, struct mapped *mapped)
{
	const struct view *view;

	if (!pages_near(address))
		return false;
	pthread_mutex_lock(&tree_lock);
	view = view_at(address);
	if (view)
		*mapped = (struct mapped){
			.device = view->region->device, .start = view->address, .bytes = view->bytes,
			.serial = view->region->serial,
			.handle_types = view->region->object->prop.requestedHandleTypes,
		};
	pthread_mutex_unlock(&tree_lock);
	return view;
}

/* Pinning. With the lock held; returns the bytes that were not pinned before. */
static uint64_t pin(struct region *region)
{
	uint64_t change = 0;

	count_intact(region, -1);
	for (size_t i = 0; i < region->chunks; i++) {
		if (region->chunk[i].pinned)
			continue;
		region->chunk[i].pinned = true;
		change += chunk_bytes(region, i);
	}
	count_intact(region, 1);
	region->device->regions->pinned += change;
	return change;
}

void object_pin(struct region *region)
{
	pthread_mutex_lock(&tree_lock);
	const uint64_t change = pin(region);
	pthread_mutex_unlock(&tree_lock);
	tree_report_pinned(region->device, (int64_t)change);
}

static bool is_reachable(const struct region *region)
{
	return object_is_whole(region) && region->object->prop.allocFlags.gpuDirectRDMACapable &&
	       !region->chunk[0].pinned;
}

void object_pin_reachable(struct device *device)
{
	struct region *first, *region;
	uint64_t change = 0;
	bool any = false;

	pthread_mutex_lock(&tree_lock);
	first = region = device->regions->ring;
	for (bool more = region; more && !any; more = (region = region->next) != first)
		any = is_reachable(region);
	pthread_mutex_unlock(&tree_lock);
	if (!any || !outside_is_open())
		return;
	pthread_mutex_lock(&tree_lock);
	first = region = device->regions->ring;
	for (bool more = region; more; more = (region = region->next) != first)
		if (is_reachable(region))
			change += pin(region);
	pthread_mutex_unlock(&tree_lock);
	tree_report_pinned(device, (int64_t)change);
}

/* Moves */

CUmemGenericAllocationHandle object_part(struct region *region)
{
	pthread_mutex_lock(&tree_lock);
	const CUmemGenericAllocationHandle whole = region->object->whole;

	count_intact(region, -1);
	region->object->whole = 0;
	pthread_mutex_unlock(&tree_lock);
	return whole;
}

void object_join(struct region *region, CUmemGenericAllocationHandle whole)
{
	pthread_mutex_lock(&tree_lock);
	region->object->whole = whole;
	count_intact(region, 1);
	pthread_mutex_unlock(&tree_lock);
}

static void forget(void)
{
	objects = (struct table){ 0 };
}

LIFE(.stage = LIFE_REGIONS, .forget = forget);
