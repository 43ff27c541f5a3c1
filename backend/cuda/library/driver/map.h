/* SPDX-License-Identifier: Apache-2.0 */
/* A map from handles of the driver to what we know of them: a hash table,
 * without a lock of its own. */
#ifndef GGROUP_CUDA_MAP_H
#define GGROUP_CUDA_MAP_H

#include <stdbool.h>
#include <stddef.h>

struct map_slot {
	const void *key;	/* NULL: free; MAP_GONE: was used */
	void *value;		/* NULL: the key has none any more */
};

struct map {
	struct map_slot *slots;
	size_t size, used;	/* a power of 2; those that are not free */
};

/* NULL: not there. */
void *map_get(const struct map *map, const void *key);
/* Adds or replaces; false: no memory. `value` is not NULL. */
bool map_put(struct map *map, const void *key, void *value);
/* Removes it and returns what was there. */
void *map_take(struct map *map, const void *key);

#endif
