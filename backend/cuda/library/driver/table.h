/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is known about addresses and handles that the driver gave out as numbers: a map whose keys
 * are 64 bits. Whoever has one has a lock for it.
 */
#ifndef GGROUP_CUDA_TABLE_H
#define GGROUP_CUDA_TABLE_H

#include <stdint.h>

#include "map.h"

struct table {
	struct map map;
};

_Static_assert(sizeof(void *) == sizeof(uint64_t), "CUDA is for 64-bit machines");

/* False without memory. Replaces what the key had. Keys are not 0; values are not NULL. */
static inline bool table_put(struct table *table, uint64_t key, void *value)
{
	return map_put(&table->map, (const void *)key, value);
}

/* NULL: not there. */
static inline void *table_get(const struct table *table, uint64_t key)
{
	return map_get(&table->map, (const void *)key);
}

/* Removes it, and returns what it had. */
static inline void *table_take(struct table *table, uint64_t key)
{
	return map_take(&table->map, (const void *)key);
}

/* Calls `visit` for every key; it may take that key out. */
static inline void table_each(struct table *table, void (*visit)(uint64_t key, void *value, void *),
			      void *argument)
{
	for (size_t i = 0; i < table->map.size; i++) {
		const struct map_slot *slot = &table->map.slots[i];

		if (slot->value)
			visit((uint64_t)slot->key, slot->value, argument);
	}
}

#endif
