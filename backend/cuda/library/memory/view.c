// SPDX-License-Identifier: Apache-2.0
#include "view.h"

#include <stdlib.h>
#include <string.h>

#include "life.h"
#include "object.h"
#include "pages.h"
#include "tree.h"

/* All of them, by their addresses; no two overlap. */
static struct view **views;
static size_t count, room;
static size_t hidden;	/* so many may come back, for which there is room */

struct view *view_new(struct region *region, CUdeviceptr address, size_t bytes, size_t offset)
{
	struct view *view = calloc(1, sizeof(*view) + bytes / GG_CHUNK * sizeof(view->access[0]));

	if (view) {
		view->region = region;
		view->address = address;
		view->bytes = bytes;
		view->offset = offset;
	}
	return view;
}

/* The place of the first view that ends above `address`. */
static size_t place_of(CUdeviceptr address)
{
	size_t low = 0, high = count;

	while (low < high) {
		const size_t middle = low + (high - low) / 2;

		if (views[middle]->address + views[middle]->bytes > address)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static void put(struct view *view, size_t at)
{
	memmove(&views[at + 1], &views[at], (count - at) * sizeof(views[0]));
	views[at] = view;
	count++;
}

bool view_insert(struct view *view)
{
	const size_t at = place_of(view->address);

	if (!pages_ready(view->address, view->bytes))
		return false;
	if (count + hidden == room) {
		const size_t more = room ? room * 2 : 64;
		struct view **bigger = realloc(views, more * sizeof(views[0]));

		if (!bigger)
			return false;
		views = bigger;
		room = more;
	}
	pages_fresh(view->address, view->bytes);
	put(view, at);
	view->next = view->region->object->views;
	view->region->object->views = view;
	return true;
}

void view_hide(struct view *view)
{
	const size_t at = place_of(view->address);

	count--;
	memmove(&views[at], &views[at + 1], (count - at) * sizeof(views[0]));
	hidden++;
}

void view_show(struct view *view)
{
	put(view, place_of(view->address));
	hidden--;
}

void view_remove(struct view *view)
{
	struct view **before = &view->region->object->views;

	while (*before != view)
		before = &(*before)->next;
	*before = view->next;
	hidden--;
}

struct view *view_from(CUdeviceptr address)
{
	const size_t at = place_of(address);

	return at < count ? views[at] : NULL;
}

struct view *view_after(const struct view *view)
{
	return view_from(view->address + view->bytes);
}

struct view *view_at(CUdeviceptr address)
{
	struct view *view = view_from(address);

	return view && view->address <= address ? view : NULL;
}

void view_set_access(struct view *view, CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t number)
{
	const CUdeviceptr end = address + bytes;

	for (size_t page = 0; page < view->bytes / GG_CHUNK; page++) {
		const CUdeviceptr at = view->address + page * GG_CHUNK;
		struct access *has = &view->access[page];

		if (at < address || at >= end)
			continue;
		for (size_t i = 0; i < number; i++) {
			const uint64_t bit = UINT64_C(1) << (access[i].location.id & (GG_ORDINALS - 1));

			if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
				continue;
			has->read &= ~bit;
			has->write &= ~bit;
			if (access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
				has->read |= bit;
			if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
				has->write |= bit;
		}
	}
}

void view_each(struct region *region,
	       void (*visit)(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, void *),
	       void *argument)
{
	for (const struct view *view = region->object->views; view; view = view->next)
		visit(region, view->address, view->bytes, view->offset, argument);
}

uint64_t view_users(const struct region *region)
{
	uint64_t users = __atomic_load_n(&region->users, __ATOMIC_ACQUIRE);

	if (!region->object)
		return users | __atomic_load_n(&region->device->regions->users, __ATOMIC_ACQUIRE);
	for (const struct view *view = region->object->views; view; view = view->next)
		for (size_t page = 0; page < view->bytes / GG_CHUNK; page++)
			users |= view->access[page].read;
	return users;
}

static struct region *region_at(CUdeviceptr address)
{
	struct region *region = pages_region(address);
	const struct view *view = region ? NULL : view_at(address);

	return view ? view->region : region;
}

void view_copied(CUdeviceptr address, size_t bytes, CUdevice by)
{
	const CUdeviceptr end = address + bytes;
	struct region *region;

	if (!pages_near(address))
		return;
	pthread_mutex_lock(&tree_lock);
	for (CUdeviceptr at = address; at < end; at = (at / GG_CHUNK + 1) * GG_CHUNK) {
		region = region_at(at);
		if (region && region->device->ordinal != by)
			__atomic_or_fetch(&region->users, UINT64_C(1) << by, __ATOMIC_ACQ_REL);
	}
	pthread_mutex_unlock(&tree_lock);
}

uint64_t view_users_at(CUdeviceptr address)
{
	const struct region *region;
	uint64_t users;

	pthread_mutex_lock(&tree_lock);
	region = region_at(address);
	users = region ? view_users(region) : 0;
	pthread_mutex_unlock(&tree_lock);
	return users;
}

bool view_is_shared(const struct region *region)
{
	return view_users(region) & ~(UINT64_C(1) << region->device->ordinal);
}

static void forget(void)
{
	free(views);
	views = NULL;
	count = room = hidden = 0;
}

LIFE(.stage = LIFE_REGIONS, .forget = forget);
