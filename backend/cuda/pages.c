// SPDX-License-Identifier: Apache-2.0
#include "tree.h"

#include <stdlib.h>
#include <string.h>

/*
 * From an address to its region, and its touched bit: two levels over GG_CHUNKs of 49 bits of addresses, which is what
 * GPUs translate up to Hopper's. Leaves are made by allocations and never freed, so that region_touch needs no lock and
 * nothing that it looks at can go away: it does not look at regions at all.
 */
#define LEAF_BITS 15
#define LEAF_PAGES (1 << LEAF_BITS)
#define CHUNK_BITS 21
#define ROOT_BITS (49 - LEAF_BITS - CHUNK_BITS)

struct leaf {
	struct region *region[LEAF_PAGES];	/* under the lock */
	uint8_t touched[LEAF_PAGES];		/* atomically */
};

static struct leaf *root[1 << ROOT_BITS];	/* atomically */

static struct leaf *leaf_of(CUdeviceptr address)
{
	uint64_t at = address >> (CHUNK_BITS + LEAF_BITS);

	return at < 1 << ROOT_BITS ? __atomic_load_n(&root[at], __ATOMIC_ACQUIRE) : NULL;
}

static size_t page_of(CUdeviceptr address)
{
	return address >> CHUNK_BITS & (LEAF_PAGES - 1);
}

struct region *pages_region(CUdeviceptr address)
{
	struct leaf *leaf = leaf_of(address);

	return leaf ? leaf->region[page_of(address)] : NULL;
}

bool pages_ready(const struct region *region)
{
	const CUdeviceptr end = region->address + region->reserved;

	for (CUdeviceptr at = region->address; at < end; at += GG_CHUNK) {
		uint64_t index = at >> (CHUNK_BITS + LEAF_BITS);

		if (index >= 1 << ROOT_BITS)
			return false;
		if (root[index])
			continue;
		struct leaf *leaf = calloc(1, sizeof(*leaf));

		if (!leaf)
			return false;
		__atomic_store_n(&root[index], leaf, __ATOMIC_RELEASE);
	}
	return true;
}

void pages_set(const struct region *region, struct region *value)
{
	for (CUdeviceptr at = region->address; at < region->address + region->reserved; at += GG_CHUNK) {
		leaf_of(at)->region[page_of(at)] = value;
		/* What was just allocated is about to be used. */
		__atomic_store_n(&leaf_of(at)->touched[page_of(at)], value != NULL, __ATOMIC_RELAXED);
	}
}

bool region_near(CUdeviceptr address)
{
	return leaf_of(address) != NULL;
}

void region_touch(CUdeviceptr address, size_t bytes)
{
	const CUdeviceptr last = bytes ? address + bytes - 1 : address;

	for (CUdeviceptr at = address & ~(GG_CHUNK - 1); at <= last && at >= (address & ~(GG_CHUNK - 1)); at += GG_CHUNK) {
		struct leaf *leaf = leaf_of(at);

		if (!leaf) {	/* on to the next */
			at |= (UINT64_C(1) << (CHUNK_BITS + LEAF_BITS)) - GG_CHUNK;
			continue;
		}
		uint8_t *touched = &leaf->touched[page_of(at)];

		/* Most are touched already: their cache lines stay shared. */
		if (!__atomic_load_n(touched, __ATOMIC_RELAXED))
			__atomic_store_n(touched, 1, __ATOMIC_RELAXED);
	}
}

bool pages_touched(CUdeviceptr start, size_t bytes)
{
	uint8_t any = 0;

	for (CUdeviceptr at = start; at < start + bytes; at += GG_CHUNK)
		any |= __atomic_exchange_n(&leaf_of(at)->touched[page_of(at)], 0, __ATOMIC_RELAXED);
	return any;
}

void pages_forget(void)
{
	memset(root, 0, sizeof(root));
}
