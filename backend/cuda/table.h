/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is known about addresses and handles that the driver gave out: a hash table with a word of value each. Whoever has
 * one has a lock for it.
 */
#ifndef GGROUP_CUDA_TABLE_H
#define GGROUP_CUDA_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct table {
	struct entry *entries;	/* NULL: empty; as many as `size`, a power of 2 */
	size_t size, used;	/* taken by keys, and by what is left of removed ones */
	size_t count;		/* keys */
};

/* False without memory. Replaces what the key had. Keys are not 0 and not UINT64_MAX. */
bool table_put(struct table *table, uint64_t key, void *value);
/* NULL: not there. */
void *table_get(const struct table *table, uint64_t key);
/* Removes it, and returns what it had. */
void *table_take(struct table *table, uint64_t key);
/* Calls `visit` for every key; it may take that key out. */
void table_each(struct table *table, void (*visit)(uint64_t key, void *value, void *), void *argument);

#endif
