// SPDX-License-Identifier: Apache-2.0
#include "table.h"

#include <stdlib.h>

#define REMOVED UINT64_MAX

struct entry {
	uint64_t key;	/* 0: never used */
	void *value;
};

static size_t slot_of(const struct table *table, uint64_t key)
{
	return (size_t)(key * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (table->size - 1);
}

static struct entry *find(const struct table *table, uint64_t key)
{
	if (!table->size)
		return NULL;
	for (size_t at = slot_of(table, key); table->entries[at].key; at = (at + 1) & (table->size - 1))
		if (table->entries[at].key == key)
			return &table->entries[at];
	return NULL;
}

static void insert(struct table *table, uint64_t key, void *value)
{
	size_t at = slot_of(table, key);

	while (table->entries[at].key)
		at = (at + 1) & (table->size - 1);
	table->entries[at] = (struct entry){ key, value };
	table->used++;
	table->count++;
}

/* Room for one more, with at most two thirds used. */
static bool grow(struct table *table)
{
	struct table larger = { .size = 64 };

	if (table->size && (table->used + 1) * 3 <= table->size * 2)
		return true;
	while (larger.size < (table->count + 1) * 3)
		larger.size *= 2;
	larger.entries = calloc(larger.size, sizeof(*larger.entries));
	if (!larger.entries)
		return false;
	for (size_t i = 0; i < table->size; i++)
		if (table->entries[i].key && table->entries[i].key != REMOVED)
			insert(&larger, table->entries[i].key, table->entries[i].value);
	free(table->entries);
	*table = larger;
	return true;
}

bool table_put(struct table *table, uint64_t key, void *value)
{
	struct entry *entry = find(table, key);

	if (entry) {
		entry->value = value;
		return true;
	}
	if (!grow(table))
		return false;
	insert(table, key, value);
	return true;
}

void *table_get(const struct table *table, uint64_t key)
{
	const struct entry *entry = find(table, key);

	return entry ? entry->value : NULL;
}

void *table_take(struct table *table, uint64_t key)
{
	struct entry *entry = find(table, key);

	if (!entry)
		return NULL;
	entry->key = REMOVED;
	table->count--;
	return entry->value;
}

void table_each(struct table *table, void (*visit)(uint64_t key, void *value, void *), void *argument)
{
	for (size_t i = 0; i < table->size; i++)
		if (table->entries[i].key && table->entries[i].key != REMOVED)
			visit(table->entries[i].key, table->entries[i].value, argument);
}
