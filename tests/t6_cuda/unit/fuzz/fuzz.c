// SPDX-License-Identifier: Apache-2.0
/*
 * A generator of the calls by which a program makes, maps, shares and frees memory, against a model of what is mapped
 * where and what is in it (model.h), while memory moves (moves.h). UNIT_STEPS says how many, UNIT_SEED which ones,
 * UNIT_FAULTS whether calls of the driver within them fail (calls.h); FAKE_OFFSETS is 1, FAKE_DEVICES 2.
 */
#include "fuzz.h"

#include <unistd.h>

#include "calls.h"
#include "marks.h"
#include "model.h"
#include "moves.h"
#include "pools.h"
#include "small.h"
#include "steps.h"
#include "tree.h"
#include "watch.h"

/* Steps between two looks at a few things, at all of them, and two lines that say how far it is. */
#define SOME_EVERY 8
#define ALL_EVERY 256
#define SAID_EVERY 100
/* The step that does not end where UNIT_HANGS is 1. */
#define HANGS_IN 50
/* Microseconds in which threads of the library let go of what they have handed out, and between two looks. */
#define LET_GO_US 10000000
#define LOOK_US 1000
/* So many steps reach every entry point, with so many times as many where some have not been through all of their
 * calls. */
#define ENOUGH 2000
#define MORE 4

/* Each once in a while, in turn; those that come often besides. */
static void (*const steps[])(void) = {
	things_make, things_release, things_retain, things_export, things_close,
	mapped_map, mapped_unmap, mapped_allow, mapped_reserve,
	plain_alloc, plain_free, plain_refused,
	pools_alloc, pools_alloc, pools_make, pools_destroy, pools_share, pools_tell, pools_ask,
	arrays_make, arrays_destroy, arrays_map, graphs_run, contexts_come_and_go, contexts_green, contexts_primary,
	bound_make, bound_bind, bound_unbind, shares_name, shares_set,
	opened_give, opened_open, opened_close,
	asked_physical, asked_address, asked_amounts,
};
static void (*const often[])(void) = {
	things_make, things_release, things_release, mapped_map, mapped_map, mapped_map, mapped_unmap,
	mapped_allow, mapped_allow,
	plain_alloc, plain_alloc, plain_free, pools_alloc, plain_free,
	model_write_view, model_write_view, model_write_view, model_write_plain, model_write_plain,
	pools_alloc, moves_now, moves_along, moves_along,
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* The next in turn for which there is what it needs. */
static void step_in_turn(void)
{
	static size_t turn;
	const uint64_t before = calls_made();

	for (size_t i = 0; i < COUNT(steps) && calls_made() == before; i++)
		steps[turn++ % COUNT(steps)]();
}

static void step(uint64_t number, uint64_t count)
{
	if (number % 2)
		step_in_turn();
	else
		often[model_any(COUNT(often))]();
	/* From then on another GPU has access to all allocations, too. */
	if (number == count - count / 3 || (number > count - count / 3 && number % 50 == 0))
		peers_give();
	if (number % SOME_EVERY == 0)
		model_check_some();
	if (number % ALL_EVERY == ALL_EVERY - 1)
		model_check_all();
}

static void say(uint64_t number)
{
	const struct double_moved moved = double_moved();

	printf("step %llu: %llu MiB out, %llu MiB in, %llu faults, %llu names, %llu of %llu pages in the host, "
	       "%llu marks, %u bare\n",
	       (unsigned long long)number, (unsigned long long)(moved.out >> 20), (unsigned long long)(moved.in >> 20),
	       (unsigned long long)calls_faults(), (unsigned long long)model.renamed,
	       (unsigned long long)model.checked_in_host, (unsigned long long)model.checked,
	       (unsigned long long)marks_made(), moves_bare());
	fflush(stdout);
}

static void end(void)
{
	double_limit(UINT64_MAX);
	model_check_all();
	peers_end();
	bound_end();
	arrays_end();
	opened_end();
	mapped_end();
	things_end();
	plain_end();
	calls_spare();	/* what could not be given back is so now */
	pools_end();
	CHECK(cuMemAddressFree(model.arena, ARENA * PAGE) == CUDA_SUCCESS);
	double_agree(model.device);
}

/* Return whether memory moved often enough, and was looked at there; else there is nothing that all this has been held
 * against. */
static bool has_moved(uint64_t count)
{
	const struct double_moved moved = double_moved();

	return moved.out > count << 20 && moved.in > count << 20 && model.renamed > count / 200 &&
	       model.checked_in_host > count / 10 && marks_made() > count / 80 && moves_bare() > count / 80;
}

/* Return the bytes of the chunk that is kept for small allocations, has none, and is in the host. */
static uint64_t kept_in_host(struct device *device)
{
	uint64_t bytes = 0;

	pthread_mutex_lock(&tree_lock);
	for (struct region *at = device->regions->small; at; at = at->next_small)
		if (small_largest(at->small) == SMALL_ORDERS && at->chunk[0].place == CHUNK_HOST)
			bytes += chunk_bytes(at, 0);
	pthread_mutex_unlock(&tree_lock);
	return bytes;
}

/* Return whether nothing is charged any more: one chunk is kept for small allocations, and the driver may have had to
 * allocate it. */
static bool is_given_back(struct device *device)
{
	return __atomic_load_n(&device->foreign, __ATOMIC_RELAXED) <= PAGE &&
	       __atomic_load_n(&device->swapped, __ATOMIC_RELAXED) == kept_in_host(device) &&
	       __atomic_load_n(&device->resident, __ATOMIC_RELAXED) - pool_kept(device) <= PAGE;
}

static uint64_t number_of(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 0) : otherwise;
}

void fuzz_prepare(void)
{
	opened_start();
}

void fuzz(struct device *device, CUcontext context, CUcontext other)
{
	const uint64_t count = number_of("UNIT_STEPS", ENOUGH);

	model.device = device;
	model.context = context;
	model.other = other;
	model_seed(number_of("UNIT_SEED", 0));
	watch_start();
	for (int i = 0; i < 2; i++)
		CHECK(real.cuStreamCreate(&model.streams[i], CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	CHECK(cuMemAddressReserve(&model.arena, ARENA * PAGE, 0, 0, 0) == CUDA_SUCCESS);
	peers_start();
	pools_default();	/* by a call of the driver's own, which is not to fail within another */
	moves_start(device);
	calls_start(number_of("UNIT_FAULTS", 0));
	for (uint64_t i = 0; i < count; i++) {
		watch_step(i);
		while (i == HANGS_IN && number_of("UNIT_HANGS", 0))	/* for a test of what is said then */
			pause();
		step(i, count);
		if (i % SAID_EVERY == 0)
			say(i);
	}
	/* How far the thread that moves memory gets beside this one differs from run to run. */
	for (uint64_t i = count; i < 2 * count && count >= ENOUGH && !has_moved(count); i++) {
		watch_step(i);
		step(i, count);
	}
	/* A call within which something moves has hundreds of the driver: what is called seldom, and by chance with a
	 * move each time, is not through them yet. Here nothing moves but where a step has it. */
	for (uint64_t i = 0; i < MORE * count && count >= ENOUGH && !calls_finished(); i++) {
		moves_allow(false);
		watch_step(2 * count + i);
		step(i, UINT64_MAX);
	}
	moves_allow(false);
	end();
	say(count);
	double_agree(device);
	/* The thread that hands out descriptors closes its own once another process has them. */
	for (unsigned int us = 0; us < LET_GO_US && !is_given_back(device); us += LOOK_US) {
		usleep(LOOK_US);
		double_agree(device);
	}
	CHECK(is_given_back(device));
	if (count < ENOUGH)
		return;
	calls_check_all();
	CHECK(has_moved(count));
}
