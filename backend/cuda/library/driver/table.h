/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A map from 64-bit keys, for addresses and handles that the driver gives out as numbers. Each user of one has a lock
 * for it.
 */
#ifndef GGROUP_CUDA_TABLE_H
#define GGROUP_CUDA_TABLE_H

#include <stdint.h>

#include "map.h"

struct table {
	struct map map;
};

_Static_assert(sizeof(void *) == sizeof(uint64_t), "CUDA is for 64-bit machines");

/* Set the value of a key, in place of a former one; false without memory. Keys are not 0; values are not NULL. */
static inline bool table_put(struct table *table, uint64_t key, void *value)
{
	return map_put(&table->map, (const void *)key, value);
}

/* Return the value of a key; NULL for none. */
static inline void *table_get(const struct table *table, uint64_t key)
{
	return map_get(&table->map, (const void *)key);
}

/* Remove a key, and return its value. */
static inline void *table_take(struct table *table, uint64_t key)
{
	return map_take(&table->map, (const void *)key);
}

/* Call `visit` for every key; it may remove that key. */
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
