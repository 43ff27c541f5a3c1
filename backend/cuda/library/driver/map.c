// SPDX-License-Identifier: Apache-2.0
/* Open addressing, at most three quarters full. */

#include "map.h"

#include <stdint.h>
#include <stdlib.h>

static const char gone;
#define MAP_GONE ((const void *)&gone)

static size_t start(const struct map *map, const void *key)
{
	return ((uintptr_t)key * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (map->size - 1);
}

static struct map_slot *find(const struct map *map, const void *key)
{
	if (!map->size)
		return NULL;
	for (size_t i = start(map, key); map->slots[i].key; i = (i + 1) & (map->size - 1))
		if (map->slots[i].key == key)
			return &map->slots[i];
	return NULL;
}

void *map_get(const struct map *map, const void *key)
{
	const struct map_slot *slot = find(map, key);

	return slot ? slot->value : NULL;
}

static void insert(struct map *map, const void *key, void *value)
{
	size_t i = start(map, key);

	while (map->slots[i].key)
		i = (i + 1) & (map->size - 1);
	map->slots[i] = (struct map_slot){ key, value };
	map->used++;
}

static bool grow(struct map *map)
{
	struct map bigger = { .size = 16 };
	size_t live = 0;

	for (size_t i = 0; i < map->size; i++)
		live += map->slots[i].key && map->slots[i].key != MAP_GONE;
	while (bigger.size < (live + 1) * 2)
		bigger.size *= 2;
	bigger.slots = calloc(bigger.size, sizeof(*bigger.slots));
	if (!bigger.slots)
		return false;
	for (size_t i = 0; i < map->size; i++)
		if (map->slots[i].key && map->slots[i].key != MAP_GONE)
			insert(&bigger, map->slots[i].key, map->slots[i].value);
	free(map->slots);
	*map = bigger;
	return true;
}

bool map_put(struct map *map, const void *key, void *value)
{
	struct map_slot *slot = find(map, key);

	if (slot) {
		slot->value = value;
		return true;
	}
	if ((map->used + 1) * 4 > map->size * 3 && !grow(map))
		return false;
	insert(map, key, value);
	return true;
}

void *map_take(struct map *map, const void *key)
{
	struct map_slot *slot = find(map, key);
	void *value;

	if (!slot)
		return NULL;
	value = slot->value;
	*slot = (struct map_slot){ MAP_GONE, NULL };
	return value;
}
