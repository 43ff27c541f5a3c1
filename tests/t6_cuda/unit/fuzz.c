// SPDX-License-Identifier: Apache-2.0
/*
 * A generator of the calls by which a program makes, maps, shares and frees its own physical memory, against a model of what
 * is mapped where and what is in it, while memory moves. UNIT_STEPS says how many, UNIT_SEED which ones; FAKE_OFFSETS is 1.
 */
#include "fuzz.h"

#include <string.h>
#include <unistd.h>

#include "double.h"
#include "ours.h"

#define PAGE GG_CHUNK
#define PAGES_MOST 20
#define THINGS 10
#define ARENA 96	/* pages */

/* Physical memory that the program has made. */
struct thing {
	CUmemGenericAllocationHandle name;
	size_t pages, held, seen;	/* seen: views */
	bool exportable, fixed;
	bool written[PAGES_MOST];
	uint64_t word[PAGES_MOST];
};

struct seen {
	struct thing *thing;	/* NULL: no view */
	size_t start, pages, offset;
	CUmemAccess_flags flags;
};

static struct thing things[THINGS];
static struct seen views[ARENA];	/* by the page of the arena that each begins at */
static struct seen *at_page[ARENA];
static CUdeviceptr arena;
static struct device *device;
static uint64_t state, words, moves, exports, renamed;

static uint64_t any(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % below;
}

static CUdeviceptr address_of(size_t page)
{
	return arena + page * PAGE;
}

static bool lives(const struct thing *thing)
{
	return thing->held || thing->seen;
}

static struct thing *any_thing(bool held)
{
	for (size_t i = 0, first = any(THINGS); i < THINGS; i++) {
		struct thing *thing = &things[(first + i) % THINGS];

		if (held ? thing->held : lives(thing))
			return thing;
	}
	return NULL;
}

static struct seen *any_view(void)
{
	for (size_t i = 0, first = any(ARENA); i < ARENA; i++)
		if (views[(first + i) % ARENA].thing)
			return &views[(first + i) % ARENA];
	return NULL;
}

static void make(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	struct thing *thing = things;

	while (thing < things + THINGS && lives(thing))
		thing++;
	if (thing == things + THINGS)
		return;
	*thing = (struct thing){ .pages = 1 + any(any(4) ? 5 : PAGES_MOST), .held = 1, .exportable = !any(4) };
	if (thing->exportable)
		prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	prop.allocFlags.gpuDirectRDMACapable = any(2);
	prop.allocFlags.compressionType = thing->fixed = !any(6);	/* from birth */
	CHECK(cuMemCreate(&thing->name, thing->pages * PAGE, &prop, 0) == CUDA_SUCCESS);
	renamed += thing->name >> 48 == 0x6767;
	for (size_t i = 0; i < THINGS; i++)
		CHECK(&things[i] == thing || !lives(&things[i]) || things[i].name != thing->name);
}

static void release(void)
{
	struct thing *thing = any_thing(true);

	if (!thing)
		return;
	CHECK(cuMemRelease(thing->name) == CUDA_SUCCESS);
	thing->held--;
}

static void retain(void)
{
	struct seen *view = any_view();
	CUmemGenericAllocationHandle name;

	if (!view)
		return;
	CHECK(cuMemRetainAllocationHandle(&name, (void *)(address_of(view->start) + any(view->pages * PAGE))) == CUDA_SUCCESS);
	CHECK(name == view->thing->name);
	view->thing->held++;
}

static void map(void)
{
	struct thing *thing = any_thing(true);
	const size_t start = any(ARENA);
	struct seen view = { .thing = thing, .start = start };

	if (!thing)
		return;
	view.offset = any(3) ? 0 : any(thing->pages);
	view.pages = any(3) ? thing->pages - view.offset : 1 + any(thing->pages - view.offset);
	for (size_t i = 0; i < view.pages; i++)
		if (start + i >= ARENA || at_page[start + i])
			return;
	CHECK(cuMemMap(address_of(start), view.pages * PAGE, view.offset * PAGE, thing->name, 0) == CUDA_SUCCESS);
	views[start] = view;
	thing->seen++;
	for (size_t i = 0; i < view.pages; i++)
		at_page[start + i] = &views[start];
}

/* Views that are neighbours, from a random one on: how many pages. */
static size_t span(struct seen *first)
{
	size_t end = first->start + first->pages;

	while (end < ARENA && at_page[end] && any(2))
		end += at_page[end]->pages;
	return end - first->start;
}

static void unmap(void)
{
	struct seen *view = any_view();
	size_t pages;

	if (!view)
		return;
	if (view->pages > 1 && !view->thing->fixed && !any(4)) {	/* no part of one */
		CHECK(cuMemUnmap(address_of(view->start), PAGE) == CUDA_ERROR_INVALID_VALUE);
		return;
	}
	pages = span(view);
	CHECK(cuMemUnmap(address_of(view->start), pages * PAGE) == CUDA_SUCCESS);
	for (size_t i = view->start, end = i + pages; i < end; i++) {
		if (at_page[i] == &views[i]) {
			views[i].thing->seen--;
			views[i].thing = NULL;
		}
		at_page[i] = NULL;
	}
}

static void set_access(void)
{
	static const CUmemAccess_flags kinds[] = { CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READ,
						   CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemAccessDesc access[2] = { { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE }, .flags = kinds[any(4)] },
				      { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 } } };
	struct seen *view = any_view();
	size_t pages;

	if (!view)
		return;
	pages = span(view);
	access[1].flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
	CHECK(cuMemSetAccess(address_of(view->start), pages * PAGE, access, 2) == CUDA_SUCCESS);
	for (size_t i = view->start; i < view->start + pages; i++)
		at_page[i]->flags = access[0].flags;
}

static void write_word(void)
{
	struct seen *view = any_view();
	size_t page;
	CUdeviceptr at;

	if (!view || view->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
		return;
	page = any(view->pages);
	at = address_of(view->start + page);
	view->thing->word[view->offset + page] = ++words;
	view->thing->written[view->offset + page] = true;
	CHECK(cuMemcpyHtoD_v2(at, &words, 8) == CUDA_SUCCESS && cuMemcpyHtoD_v2(at + PAGE - 8, &words, 8) == CUDA_SUCCESS);
}

static void check_view(const struct seen *view)
{
	const CUmemLocation location = { .type = CU_MEM_LOCATION_TYPE_DEVICE };
	unsigned long long flags;
	unsigned int type = 0;

	CHECK(cuMemGetAccess(&flags, &location, address_of(view->start)) == CUDA_SUCCESS && flags == view->flags);
	if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address_of(view->start)) == CUDA_SUCCESS)
		CHECK(type == CU_MEMORYTYPE_DEVICE);
	for (size_t i = 0; i < view->pages && view->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE; i++) {
		const uint64_t word = view->thing->word[view->offset + i];
		uint64_t first = 0, last = 0;

		if (!view->thing->written[view->offset + i])
			continue;
		CHECK(cuMemcpyDtoH_v2(&first, address_of(view->start + i), 8) == CUDA_SUCCESS);
		CHECK(cuMemcpyDtoH_v2(&last, address_of(view->start + i) + PAGE - 8, 8) == CUDA_SUCCESS);
		CHECK(first == word && last == word);
	}
}

static void check_all(void)
{
	for (size_t i = 0; i < ARENA; i++)
		if (views[i].thing)
			check_view(&views[i]);
	double_agree(device);
}

static void move(void)
{
	const uint64_t bytes = (1 + any(30)) * PAGE;

	moves++;
	switch (any(5)) {
	case 0:
		double_exchange(device, bytes);
		break;
	case 1:
		double_limit(any(3) ? UINT64_MAX : bytes);
		break;
	case 2:
		double_in(device, any(2) ? UINT64_MAX : bytes);
		break;
	default:
		double_out(device, any(2) ? UINT64_MAX : bytes);
	}
}

static void ask(void)
{
	struct thing *thing = any_thing(true);
	CUmemAllocationProp prop;
	CUdeviceptr other;
	int fd;

	if (!thing)
		return;
	CHECK(cuMemGetAllocationPropertiesFromHandle(&prop, thing->name) == CUDA_SUCCESS);
	CHECK((prop.requestedHandleTypes != 0) == thing->exportable);
	if (thing->exportable && !any(6)) {
		CHECK(cuMemExportToShareableHandle(&fd, thing->name, prop.requestedHandleTypes, 0) == CUDA_SUCCESS);
		close(fd);
		exports++;
	}
	CHECK(cuMemAlloc_v2(&other, 3 << 20) == CUDA_SUCCESS && cuMemFree_v2(other) == CUDA_SUCCESS);
}

static void step(void)
{
	static void (*const steps[])(void) = {
		make, make, release, retain, map, map, map, unmap, set_access, set_access,
		write_word, write_word, write_word, write_word, move, ask,
	};

	steps[any(sizeof(steps) / sizeof(steps[0]))]();
}

void fuzz(struct device *of)
{
	const char *text = getenv("UNIT_STEPS"), *seed = getenv("UNIT_SEED");
	const uint64_t count = text ? strtoull(text, NULL, 0) : 2000;

	device = of;
	state = UINT64_C(0x9e3779b97f4a7c15) * (1 + (seed ? strtoull(seed, NULL, 0) : 0));
	CHECK(cuMemAddressReserve(&arena, ARENA * PAGE, 0, 0, 0) == CUDA_SUCCESS);
	for (uint64_t i = 0; i < count; i++) {
		step();
		if (i % 8 == 0)
			check_all();
	}
	double_limit(UINT64_MAX);
	check_all();
	for (size_t i = 0; i < ARENA; i++)
		if (views[i].thing)
			CHECK(cuMemUnmap(address_of(i), views[i].pages * PAGE) == CUDA_SUCCESS);
	for (size_t i = 0; i < THINGS; i++)
		while (things[i].held && things[i].held--)
			CHECK(cuMemRelease(things[i].name) == CUDA_SUCCESS);
	CHECK(cuMemAddressFree(arena, ARENA * PAGE) == CUDA_SUCCESS);
	double_agree(device);
	CHECK(device->foreign == 0 && device->swapped == 0 && device->resident == pool_kept(device));
	printf("%llu moves, %llu exports, %llu renamed\n", (unsigned long long)moves, (unsigned long long)exports,
	       (unsigned long long)renamed);
}
