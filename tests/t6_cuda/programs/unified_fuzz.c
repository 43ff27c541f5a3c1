/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unified_fuzz STEPS SEED: anything that a program may say of its managed memory, in any order, while the test has it
 * moved to the host and let back. What it said is kept page by page, and is what each question is answered with; its
 * data stays.
 */
#include "common.h"

void fake_managed_touch(CUdeviceptr address, size_t bytes, int device);

#define PAGE ((size_t)4096)
#define ALLOCATIONS 4
#define PAGES_MOST (12 * 1024)
#define GPUS 2

struct page {
	bool mostly_read, prefers, by_host, fetched;
	CUmemLocation preferred, last;
	unsigned int by;
};

static struct allocation {
	CUdeviceptr address;
	size_t pages;
	unsigned char mark;
	struct page page[PAGES_MOST];
} allocations[ALLOCATIONS];

static uint64_t state;

static uint64_t any(uint64_t below)
{
	state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
	return (state >> 33) % below;
}

static CUmemLocation somewhere(void)
{
	const uint64_t which = any(GPUS + 1);

	return which == GPUS ? (CUmemLocation){ .type = CU_MEM_LOCATION_TYPE_HOST } :
			       (CUmemLocation){ .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)which };
}

static CUdevice number_of(CUmemLocation location)
{
	return location.type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : location.id;
}

static void make(struct allocation *allocation)
{
	allocation->pages = any(4) ? 512 + any(PAGES_MOST - 512) : 1 + any(511);
	DO(cuMemAllocManaged(&allocation->address, allocation->pages * PAGE - any(PAGE), CU_MEM_ATTACH_GLOBAL));
	memset(allocation->page, 0, sizeof(allocation->page));
	allocation->mark = (unsigned char)any(256);
	for (size_t i = 0; i < allocation->pages; i++)
		*(unsigned char *)(allocation->address + i * PAGE) = (unsigned char)(allocation->mark + i);
}

static void unmake(struct allocation *allocation)
{
	for (size_t i = 0; i < allocation->pages; i++)
		CHECK(*(unsigned char *)(allocation->address + i * PAGE) == (unsigned char)(allocation->mark + i));
	DO(cuMemFree_v2(allocation->address));
	allocation->address = 0;
}

static void advise(struct allocation *allocation, size_t first, size_t count)
{
	const CUmem_advise advice = (CUmem_advise)(1 + any(6));
	const CUmemLocation location = somewhere();
	const CUdeviceptr start = allocation->address + first * PAGE;

	if (any(2))
		DO(cuMemAdvise_v2(start, count * PAGE, advice, location));
	else
		DO(cuMemAdvise(start, count * PAGE, advice, number_of(location)));
	for (size_t i = first; i < first + count; i++) {
		struct page *page = &allocation->page[i];
		const bool is_host = location.type == CU_MEM_LOCATION_TYPE_HOST;
		const unsigned int bit = is_host ? 0 : 1u << location.id;

		switch (advice) {
		case CU_MEM_ADVISE_SET_READ_MOSTLY: page->mostly_read = true; break;
		case CU_MEM_ADVISE_UNSET_READ_MOSTLY: page->mostly_read = false; break;
		case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: page->prefers = true; page->preferred = location; break;
		case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: page->prefers = false; break;
		case CU_MEM_ADVISE_SET_ACCESSED_BY: page->by |= bit; page->by_host |= is_host; break;
		case CU_MEM_ADVISE_UNSET_ACCESSED_BY: page->by &= ~bit; page->by_host &= !is_host; break;
		}
	}
}

static void prefetch(struct allocation *allocation, size_t first, size_t count)
{
	const CUdeviceptr start = allocation->address + first * PAGE;
	CUmemLocation location = somewhere();
	size_t bytes = count * PAGE, none = 0;
	CUdeviceptr at = start;

	switch (any(4)) {
	case 0: DO(cuMemPrefetchAsync(start, bytes, number_of(location), 0)); break;
	case 1: DO(cuMemPrefetchAsync_v2_ptsz(start, bytes, location, 0, 0)); break;
	case 2: DO(cuMemPrefetchBatchAsync(&at, &bytes, 1, &location, &none, 1, 0, CU_STREAM_LEGACY)); break;
	case 3: DO(cuMemPrefetchAsync_v2(start, bytes, location, 0, 0)); break;
	}
	for (size_t i = first; i < first + count; i++) {
		allocation->page[i].fetched = true;
		allocation->page[i].last = location;
	}
}

static bool same(CUmemLocation one, CUmemLocation other)
{
	return number_of(one) == number_of(other);
}

static void ask(const struct allocation *allocation, size_t first, size_t count)
{
	const CUdeviceptr start = allocation->address + first * PAGE;
	struct page expected = allocation->page[first];
	int by[GPUS + 2], found, at = 0;

	for (size_t i = first; i < first + count; i++) {
		const struct page *page = &allocation->page[i];

		expected.mostly_read &= page->mostly_read;
		expected.prefers &= page->prefers && same(expected.preferred, page->preferred);
		expected.fetched &= page->fetched && same(expected.last, page->last);
		expected.by &= page->by;
		expected.by_host &= page->by_host;
	}
	DO(cuMemRangeGetAttribute(&found, sizeof(found), CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, start, count * PAGE));
	CHECK(found == expected.mostly_read);
	DO(cuMemRangeGetAttribute(&found, sizeof(found), CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, start,
				  count * PAGE));
	CHECK(found == (expected.prefers ? number_of(expected.preferred) : CU_DEVICE_INVALID));
	DO(cuMemRangeGetAttribute(&found, sizeof(found), CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, start,
				  count * PAGE));
	CHECK(found == (expected.fetched ? number_of(expected.last) : CU_DEVICE_INVALID));
	DO(cuMemRangeGetAttribute(by, sizeof(by), CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, start, count * PAGE));
	if (expected.by_host)
		CHECK(by[at++] == CU_DEVICE_CPU);
	for (int device = 0; device < GPUS; device++)
		if (expected.by >> device & 1)
			CHECK(by[at++] == device);
	CHECK(by[at] == CU_DEVICE_INVALID);
}

static void step(void)
{
	struct allocation *allocation = &allocations[any(ALLOCATIONS)];
	size_t first, count;

	if (!allocation->address) {
		make(allocation);
		return;
	}
	first = any(allocation->pages);
	count = 1 + any(allocation->pages - first);
	switch (any(12)) {
	case 0: unmake(allocation); break;
	case 1: case 2: case 3: advise(allocation, first, count); break;
	case 4: case 5: prefetch(allocation, first, count); break;
	case 6: fake_managed_touch(allocation->address + first * PAGE, count * PAGE, (int)any(GPUS)); break;
	default: ask(allocation, first, count); break;
	}
}

int main(int argc, char **argv)
{
	const uint64_t steps = argc > 1 ? strtoull(argv[1], NULL, 0) : 100;

	state = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
	start(0);
	for (uint64_t i = 0; i < steps; i++) {
		step();
		if (i % 64 == 0)
			tell("step", i);
	}
	for (int i = 0; i < ALLOCATIONS; i++)
		if (allocations[i].address)
			unmake(&allocations[i]);
	tell("freed", 0);
	return 0;
}
