// SPDX-License-Identifier: Apache-2.0
#include "small.h"

#include <stdlib.h>

/* A block in use is the word at its first unit: the size asked for in bytes, and above that its serial number. */
#define ASKED_BITS 21
#define ASKED_MASK ((UINT64_C(1) << ASKED_BITS) - 1)

#define WORDS(order) ((SMALL_UNITS >> (order)) / 64 ? (SMALL_UNITS >> (order)) / 64 : 1)

struct small {
	/* One bit per free block, one map per order; the last order is the whole chunk. SMALL_UNITS / 64 words hold
	 * order 0, half of that order 1, and so on; orders with less than 64 blocks take a word each. */
	uint64_t *map[SMALL_ORDERS + 1];
	unsigned int free[SMALL_ORDERS + 1];
	uint64_t words[SMALL_UNITS / 64 * 2 + SMALL_ORDERS];
	/* 0: no block starts here. */
	uint64_t block[SMALL_UNITS];
	/* The order of the block that starts here, where there is one: alignment may have made it larger than its size
	 * needs. */
	uint8_t order[SMALL_UNITS];
};

static bool bit(const struct small *small, unsigned int order, uint64_t at)
{
	return small->map[order][at / 64] >> (at % 64) & 1;
}

static void put(struct small *small, unsigned int order, uint64_t at)
{
	small->map[order][at / 64] |= UINT64_C(1) << (at % 64);
	small->free[order]++;
}

static void take(struct small *small, unsigned int order, uint64_t at)
{
	small->map[order][at / 64] &= ~(UINT64_C(1) << (at % 64));
	small->free[order]--;
}

struct small *small_new(void)
{
	struct small *small = calloc(1, sizeof(*small));
	uint64_t *words;

	if (!small)
		return NULL;
	words = small->words;
	for (unsigned int order = 0; order <= SMALL_ORDERS; order++) {
		small->map[order] = words;
		words += WORDS(order);
	}
	put(small, SMALL_ORDERS, 0);
	return small;
}

void small_delete(struct small *small)
{
	free(small);
}

unsigned int small_order(uint64_t bytes, uint64_t alignment)
{
	unsigned int order = 0;

	/* Blocks are aligned to their own size. */
	if (alignment > bytes)
		bytes = alignment;
	while (order <= SMALL_ORDERS && SMALL_UNIT << order < bytes)
		order++;
	return order;
}

/* Return the lowest free block of an order that has one: low addresses fill up first, so that high ones become
 * empty. */
static uint64_t lowest(const struct small *small, unsigned int order)
{
	uint64_t word = 0;

	while (!small->map[order][word])
		word++;
	return word * 64 + (uint64_t)__builtin_ctzll(small->map[order][word]);
}

bool small_alloc(struct small *small, uint64_t bytes, uint64_t alignment, uint64_t serial,
		 uint64_t *offset)
{
	unsigned int order = small_order(bytes, alignment), from = order;
	uint64_t at;

	if (!bytes || order >= SMALL_ORDERS)
		return false;
	while (from <= SMALL_ORDERS && !small->free[from])
		from++;
	if (from > SMALL_ORDERS)
		return false;
	at = lowest(small, from);
	take(small, from, at);
	while (from > order) {	/* the upper half of every split stays free */
		from--;
		at *= 2;
		put(small, from, at + 1);
	}
	at <<= order;	/* in units */
	small->block[at] = serial << ASKED_BITS | bytes;
	small->order[at] = (uint8_t)order;
	*offset = at * SMALL_UNIT;
	return true;
}

bool small_free(struct small *small, uint64_t offset)
{
	uint64_t at = offset / SMALL_UNIT;
	unsigned int order;

	if (offset % SMALL_UNIT || at >= SMALL_UNITS || !small->block[at])
		return false;
	small->block[at] = 0;
	order = small->order[at];
	at >>= order;
	while (order < SMALL_ORDERS && bit(small, order, at ^ 1)) {
		take(small, order, at ^ 1);
		at /= 2;
		order++;
	}
	put(small, order, at);
	return true;
}

bool small_find(const struct small *small, uint64_t offset, uint64_t *start, uint64_t *bytes,
		uint64_t *serial)
{
	uint64_t unit = offset / SMALL_UNIT;

	if (unit >= SMALL_UNITS)
		return false;
	for (unsigned int order = 0; order < SMALL_ORDERS; order++) {
		uint64_t at = unit >> order << order;

		/* The block that starts nearest below contains the offset, if it reaches that far. */
		if (!small->block[at])
			continue;
		if (offset - at * SMALL_UNIT >= (small->block[at] & ASKED_MASK))
			return false;
		*start = at * SMALL_UNIT;
		*bytes = small->block[at] & ASKED_MASK;
		*serial = small->block[at] >> ASKED_BITS;
		return true;
	}
	return false;
}

int small_largest(const struct small *small)
{
	for (int order = SMALL_ORDERS; order >= 0; order--)
		if (small->free[order])
			return order;
	return -1;
}
