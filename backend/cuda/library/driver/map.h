/* SPDX-License-Identifier: Apache-2.0 */
/* A hash table from handles of the driver to what is known of them, without a lock of its own. */
#ifndef GGROUP_CUDA_MAP_H
#define GGROUP_CUDA_MAP_H

#include <stdbool.h>
#include <stddef.h>

struct map_slot {
	const void *key;	/* NULL: free; MAP_GONE: removed */
	void *value;		/* NULL: the key was removed */
};

struct map {
	struct map_slot *slots;
	size_t size, used;	/* a power of 2; number of slots that are not free */
};

/* Return the value of a key; NULL for none. */
void *map_get(const struct map *map, const void *key);
/* Add or replace a value, which is not NULL; false without memory. */
bool map_put(struct map *map, const void *key, void *value);
/* Remove a key, and return its value. */
void *map_take(struct map *map, const void *key);

#endif
