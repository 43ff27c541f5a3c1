// SPDX-License-Identifier: Apache-2.0
#include "pages.h"

#include <stdlib.h>
#include <string.h>

#include "life.h"

/*
 * A table from an address to its region and to its uses: two levels over the GG_CHUNKs of a 49-bit address space, which
 * is what GPUs up to Hopper translate. Leaves are made by allocations and never freed, so pages_use needs no lock: it
 * looks at no regions, and nothing that it does look at can go away.
 *
 * A kernel is told where an object begins, but not how long it is. So uses are counted at the page that a pointer
 * points to. At each look they apply from there to the next page in which another object was seen to begin, so a tensor
 * in a large allocation has its own heat. A page in which no beginning was seen for some looks counts as having none. A
 * copy tells both ends, so the pages between them have no beginning.
 */
#define LEAF_BITS 15
#define LEAF_PAGES (1 << LEAF_BITS)
#define CHUNK_BITS 21
#define ROOT_BITS (49 - LEAF_BITS - CHUNK_BITS)
/* Looks for which a beginning is remembered. A view into the middle of an object that was used once must not divide it
 * for ever. */
#define BEGINS_LOOKS 16

struct leaf {
	struct region *region[LEAF_PAGES];	/* under the tree's lock */
	uint16_t uses[LEAF_PAGES];		/* since the last look; atomically */
	uint8_t begins[LEAF_PAGES];		/* looks for which a beginning is still remembered here; atomically */
	uint32_t first[LEAF_PAGES];		/* number of the first use since the last turn; 0: none; atomically */
};

static struct leaf *root[1 << ROOT_BITS];	/* atomically */
static uint32_t firsts;				/* number of first uses so far, of all pages; atomically */

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

bool pages_ready(CUdeviceptr address, size_t bytes)
{
	for (CUdeviceptr at = address; at < address + bytes; at += GG_CHUNK) {
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

void pages_fresh(CUdeviceptr address, size_t bytes)
{
	for (CUdeviceptr at = address; at < address + bytes; at += GG_CHUNK) {
		__atomic_store_n(&leaf_of(at)->uses[page_of(at)], 0, __ATOMIC_RELAXED);
		__atomic_store_n(&leaf_of(at)->begins[page_of(at)], 0, __ATOMIC_RELAXED);
		__atomic_store_n(&leaf_of(at)->first[page_of(at)], 0, __ATOMIC_RELAXED);
	}
}

void pages_set(const struct region *region, struct region *value)
{
	for (CUdeviceptr at = region->address; at < region->address + region->reserved; at += GG_CHUNK)
		leaf_of(at)->region[page_of(at)] = value;
	pages_fresh(region->address, region->reserved);
}

bool pages_near(CUdeviceptr address)
{
	return leaf_of(address) != NULL;
}

static void begin(struct leaf *leaf, CUdeviceptr at)
{
	uint8_t *begins = &leaf->begins[page_of(at)];

	if (__atomic_load_n(begins, __ATOMIC_RELAXED) != BEGINS_LOOKS)
		__atomic_store_n(begins, BEGINS_LOOKS, __ATOMIC_RELAXED);
}

static void use(struct leaf *leaf, CUdeviceptr at)
{
	uint16_t *uses = &leaf->uses[page_of(at)];
	uint32_t *first = &leaf->first[page_of(at)], number;
	const uint16_t before = __atomic_load_n(uses, __ATOMIC_RELAXED);

	/* A use lost in a race of two threads does no harm. */
	if (before < UINT16_MAX)
		__atomic_store_n(uses, before + 1, __ATOMIC_RELAXED);
	if (!__atomic_load_n(first, __ATOMIC_RELAXED)) {
		number = __atomic_add_fetch(&firsts, 1, __ATOMIC_RELAXED);
		/* After 2^32 the numbers start again; the order of one turn is then wrong. */
		__atomic_store_n(first, number ? number : 1, __ATOMIC_RELAXED);
	}
}

void pages_use_from(CUdeviceptr address)
{
	struct leaf *leaf = leaf_of(address);

	if (!leaf)
		return;
	begin(leaf, address);
	use(leaf, address);
}

void pages_use(CUdeviceptr address, size_t bytes)
{
	const CUdeviceptr first = address & ~(GG_CHUNK - 1), last = bytes ? address + bytes - 1 : address;
	CUdeviceptr at;
	struct leaf *leaf = leaf_of(first);

	if (leaf)
		begin(leaf, first);
	for (at = first; at <= last && at >= first; at += GG_CHUNK) {
		leaf = leaf_of(at);
		if (leaf)
			use(leaf, at);
		else	/* on to the next leaf */
			at |= (UINT64_C(1) << (CHUNK_BITS + LEAF_BITS)) - GG_CHUNK;
	}
	leaf = leaf_of(at);
	if (leaf)
		begin(leaf, at);
}

uint32_t pages_uses(CUdeviceptr address)
{
	return __atomic_load_n(&leaf_of(address)->uses[page_of(address)], __ATOMIC_RELAXED);
}

uint32_t pages_look(CUdeviceptr address, uint32_t before)
{
	struct leaf *leaf = leaf_of(address);
	uint8_t *begins = &leaf->begins[page_of(address)];
	uint32_t uses = pages_uses(address);

	if (uses)
		uses = __atomic_exchange_n(&leaf->uses[page_of(address)], 0, __ATOMIC_RELAXED);
	if (!__atomic_load_n(begins, __ATOMIC_RELAXED))
		return uses > before ? uses : before;
	__atomic_sub_fetch(begins, 1, __ATOMIC_RELAXED);
	return uses;
}

bool pages_used(CUdeviceptr address)
{
	return __atomic_load_n(&leaf_of(address)->first[page_of(address)], __ATOMIC_RELAXED) != 0;
}

uint32_t pages_first(CUdeviceptr address, uint32_t before)
{
	struct leaf *leaf = leaf_of(address);
	uint8_t *begins = &leaf->begins[page_of(address)];
	uint32_t first = __atomic_load_n(&leaf->first[page_of(address)], __ATOMIC_RELAXED);

	if (first)
		first = __atomic_exchange_n(&leaf->first[page_of(address)], 0, __ATOMIC_RELAXED);
	if (!__atomic_load_n(begins, __ATOMIC_RELAXED))
		return !first || (before && before < first) ? before : first;
	__atomic_sub_fetch(begins, 1, __ATOMIC_RELAXED);
	return first;
}

static void forget(void)
{
	memset(root, 0, sizeof(root));
	firsts = 0;
}

LIFE(.stage = LIFE_REGIONS, .forget = forget);
