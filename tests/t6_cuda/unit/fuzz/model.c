// SPDX-License-Identifier: Apache-2.0
#include "model.h"

#include <dlfcn.h>
#include <pthread.h>

#include "moves.h"
#include "steps.h"

/* Number of views and of allocations that are checked between steps: each has up to 40 copies. */
#define SOME 3

struct model model;

static uint64_t state, odd_state = 88172645463325252, words;
static pthread_mutex_t odd_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t next(uint64_t *of)
{
	*of ^= *of << 13;
	*of ^= *of >> 7;
	*of ^= *of << 17;
	return *of;
}

void model_seed(uint64_t seed)
{
	state = UINT64_C(0x9e3779b97f4a7c15) * (1 + seed);
}

uint64_t model_any(uint64_t below)
{
	return next(&state) % below;
}

uint64_t model_odd(uint64_t below)
{
	pthread_mutex_lock(&odd_lock);
	const uint64_t number = next(&odd_state) % below;
	pthread_mutex_unlock(&odd_lock);
	return number;
}

CUdeviceptr model_address(size_t page)
{
	return model.arena + page * PAGE;
}

bool model_lives(const struct thing *thing)
{
	return thing->held || thing->seen || thing->bound;
}

struct thing *model_thing_that(bool (*is)(const struct thing *))
{
	for (size_t i = 0, first = model_any(THINGS); i < THINGS; i++) {
		struct thing *thing = &model.things[(first + i) % THINGS];

		if (model_lives(thing) && is(thing))
			return thing;
	}
	return NULL;
}

static bool is_held(const struct thing *thing)
{
	return thing->held;
}

struct thing *model_thing(void)
{
	return model_thing_that(is_held);
}

struct thing *model_free_thing(void)
{
	for (struct thing *thing = model.things; thing < model.things + THINGS; thing++)
		if (!model_lives(thing))
			return thing;
	return NULL;
}

struct seen *model_view(void)
{
	for (size_t i = 0, first = model_any(ARENA); i < ARENA; i++)
		if (model.views[(first + i) % ARENA].thing)
			return &model.views[(first + i) % ARENA];
	return NULL;
}

size_t model_span(const struct seen *first)
{
	size_t end = first->start + first->pages;

	while (end < ARENA && model.at_page[end] && model_any(2))
		end += model.at_page[end]->pages;
	return end - first->start;
}

struct plain *model_plain_that(bool (*is)(const struct plain *))
{
	for (size_t i = 0, first = model_any(PLAINS); i < PLAINS; i++) {
		struct plain *plain = &model.plains[(first + i) % PLAINS];

		if (plain->address && is(plain))
			return plain;
	}
	return NULL;
}

static bool is_any(const struct plain *plain)
{
	return plain;
}

struct plain *model_plain(void)
{
	return model_plain_that(is_any);
}

struct plain *model_free_plain(void)
{
	for (struct plain *plain = model.plains; plain < model.plains + PLAINS; plain++)
		if (!plain->address)
			return plain;
	return NULL;
}

void model_named(const struct thing *thing)
{
	model.renamed += thing->name >> 48 == 0x6767;
	for (size_t i = 0; i < THINGS; i++)
		CHECK(&model.things[i] == thing || !model_lives(&model.things[i]) ||
		      model.things[i].name != thing->name);
}

void model_settle(struct thing *thing)
{
	if (model_lives(thing))
		return;
	if (thing->multicast)
		bound_gone(thing);
	if (!thing->contents)
		return;
	if (!--thing->contents->users)
		free(thing->contents);
	thing->contents = NULL;
}

/* Contents */

static void write_word(CUdeviceptr at, uint64_t word)
{
	CHECK(cuMemcpyHtoD_v2(at, &word, sizeof(word)) == CUDA_SUCCESS);
}

static uint64_t read_word(CUdeviceptr at)
{
	uint64_t word = 0;

	CHECK(cuMemcpyDtoH_v2(&word, at, sizeof(word)) == CUDA_SUCCESS);
	return word;
}

void model_write_view(void)
{
	struct seen *view = model_view();
	size_t page;
	CUdeviceptr at;

	if (!view || view->flags[0] != CU_MEM_ACCESS_FLAGS_PROT_READWRITE || !view->thing->contents)
		return;
	page = model_any(view->pages);
	at = model_address(view->start + page);
	view->thing->contents->word[view->offset + page] = ++words;
	view->thing->contents->written[view->offset + page] = true;
	write_word(at, words);
	write_word(at + PAGE - 8, words);
}

void model_write_plain(void)
{
	struct plain *plain = model_plain();
	size_t page;

	if (!plain || plain->bytes < 16)
		return;
	if (plain->bytes % PAGE && model_any(2)) {
		plain->tail = ++words;
		write_word(plain->address + plain->bytes - 8, words);
		return;
	}
	page = plain->bytes < PAGE ? 0 : model_any(plain->bytes / PAGE);
	plain->contents.word[page] = ++words;
	plain->contents.written[page] = true;
	write_word(plain->address + page * PAGE, words);
	if (plain->bytes >= (page + 1) * PAGE)
		write_word(plain->address + (page + 1) * PAGE - 8, words);
}

int model_place(CUdeviceptr address)
{
	static int (*ask)(CUdeviceptr);

	if (!ask)
		ask = driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_memory_place");
	return ask(address);
}

static void check_place(CUdeviceptr address, bool stays)
{
	const int at = model_place(address);

	CHECK(!stays || at == CU_MEM_LOCATION_TYPE_DEVICE || at < 0);
	model.checked++;
	model.checked_in_host += at > CU_MEM_LOCATION_TYPE_DEVICE;
}

static void check_view(const struct seen *view)
{
	const CUdeviceptr start = model_address(view->start);
	const struct contents *contents = view->thing->contents;
	unsigned int type = 0;

	for (int gpu = 0; gpu < GPUS; gpu++) {
		const CUmemLocation location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu };
		unsigned long long flags = ~0ULL;

		CHECK(cuMemGetAccess(&flags, &location, start + model_any(view->pages) * PAGE) == CUDA_SUCCESS);
		CHECK(flags == view->flags[gpu]);
	}
	CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, start) == CUDA_SUCCESS);
	CHECK(type == CU_MEMORYTYPE_DEVICE);
	for (size_t i = 0; i < view->pages; i++) {
		const CUdeviceptr at = start + i * PAGE;

		check_place(at, view->thing->stays || view->thing->by_driver);
		if (!contents || view->flags[0] == CU_MEM_ACCESS_FLAGS_PROT_NONE ||
		    !contents->written[view->offset + i])
			continue;
		CHECK(read_word(at) == contents->word[view->offset + i]);
		CHECK(read_word(at + PAGE - 8) == contents->word[view->offset + i]);
	}
}

static void check_plain(const struct plain *plain)
{
	for (size_t page = 0; page <= plain->bytes / PAGE && page < PAGES_MOST; page++) {
		const CUdeviceptr at = plain->address + page * PAGE;

		if (page * PAGE < plain->bytes)
			check_place(at, plain->stays);
		if (!plain->contents.written[page])
			continue;
		CHECK(read_word(at) == plain->contents.word[page]);
		if (plain->bytes >= (page + 1) * PAGE)
			CHECK(read_word(at + PAGE - 8) == plain->contents.word[page]);
	}
	if (plain->tail)
		CHECK(read_word(plain->address + plain->bytes - 8) == plain->tail);
}

void model_check_some(void)
{
	for (int i = 0; i < SOME; i++) {
		const struct seen *view = model_view();
		const struct plain *plain = model_plain();

		if (view)
			check_view(view);
		if (plain)
			check_plain(plain);
	}
	moves_rest();
	double_agree(model.device);
}

void model_check_all(void)
{
	for (size_t i = 0; i < ARENA; i++)
		if (model.views[i].thing)
			check_view(&model.views[i]);
	for (size_t i = 0; i < PLAINS; i++)
		if (model.plains[i].address)
			check_plain(&model.plains[i]);
	moves_rest();
	double_agree(model.device);
}
