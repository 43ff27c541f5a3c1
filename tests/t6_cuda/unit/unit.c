// SPDX-License-Identifier: Apache-2.0
/* Tests of memory.c, region.c, pool.c, mover.c, async.c: `unit NAME` runs one against the double of the driver. */

#include <dlfcn.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "async.h"
#include "carry.h"
#include "calm.h"
#include "counters.h"
#include "device.h"
#include "double.h"
#include "exchange.h"
#include "chunk.h"
#include "clean.h"
#include "gate.h"
#include "keeper.h"
#include "library.h"
#include "order.h"
#include "marks.h"
#include "ours.h"
#include "pages.h"
#include "parked.h"
#include "pick.h"
#include "pin.h"
#include "totals.h"
#include "tree.h"
#include "turn.h"

static struct device *device;
static CUcontext context;
static int (*place)(CUdeviceptr);

/* What the library does not catch, in the driver's double. */
static void *plain(const char *name)
{
	void *found = driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);

	CHECK(found);
	return found;
}

static CUcontext retain(CUdevice ordinal)
{
	__typeof__(&cuDevicePrimaryCtxRetain) function = (__typeof__(function))plain("cuDevicePrimaryCtxRetain");
	CUcontext retained;

	CHECK(function(&retained, ordinal) == CUDA_SUCCESS);
	return retained;
}

static void start(void)
{
	library_begin();
	CHECK(real.cuInit(0) == CUDA_SUCCESS);
	context = retain(0);
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	device = device_current();
	CHECK(device && device->elastic);
	/* A driver made of threads, on a busy machine: longer than any copy. */
	device->mover->copy_us = device->mover->work_us = 60000000;
	device->mover->mark_us = 60000000;
	place = (int (*)(CUdeviceptr))plain("fake_memory_place");
}

static uint64_t random_state = 1;
static uint64_t any(uint64_t below)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % below;
}

/* An allocation and what is in it: a pattern by `seed`. */
struct item {
	CUdeviceptr address;
	size_t bytes;
	uint64_t seed;
};

static void fill(const struct item *item)
{
	uint64_t *data = malloc(item->bytes + 8);

	for (size_t i = 0; i <= item->bytes / 8; i++)
		data[i] = item->seed + i * UINT64_C(0x9e3779b97f4a7c15);
	CHECK(cuMemcpyHtoD_v2(item->address, data, item->bytes) == CUDA_SUCCESS);
	free(data);
}

static void verify(const struct item *item)
{
	uint64_t *data = calloc(1, item->bytes + 8);

	CHECK(cuMemcpyDtoH_v2(data, item->address, item->bytes) == CUDA_SUCCESS);
	for (size_t i = 0; i < item->bytes / 8; i++)
		CHECK(data[i] == item->seed + i * UINT64_C(0x9e3779b97f4a7c15));
	free(data);
}

static const size_t sizes[] = { 1, 500, 512, 513, 4096, 100000, 600000, 1 << 20, 3 << 20, 20 << 20, 70 << 20 };
#define SIZES (sizeof(sizes) / sizeof(sizes[0]))

static void test_basic(void)
{
	struct item items[SIZES];
	CUdeviceptr base;
	size_t bytes;

	start();
	for (size_t i = 0; i < SIZES; i++) {
		items[i] = (struct item){ .bytes = sizes[i], .seed = i };
		CHECK(cuMemAlloc_v2(&items[i].address, sizes[i]) == CUDA_SUCCESS);
		CHECK(items[i].address % 512 == 0);
		fill(&items[i]);
		CHECK(cuMemGetAddressRange_v2(&base, &bytes, items[i].address + sizes[i] / 2) == CUDA_SUCCESS);
		CHECK(base == items[i].address && bytes == sizes[i]);
	}
	double_agree(device);
	for (int round = 0; round < 3; round++) {
		/* The first round finds everything touched: it gets its second chance, and goes. */
		const uint64_t all = device->resident;
		CHECK(double_out(device, all) == all);
		double_agree(device);
		CHECK(device->resident == 0);
		for (size_t i = 0; i < SIZES; i++) {
			CHECK(place(items[i].address) == CU_MEM_LOCATION_TYPE_HOST_NUMA);
			verify(&items[i]);
			items[i].seed += 100;
			fill(&items[i]);
		}
		CHECK(double_in(device, UINT64_MAX) == all);
		double_agree(device);
		CHECK(device->swapped == 0);
		for (size_t i = 0; i < SIZES; i++) {
			CHECK(place(items[i].address) == CU_MEM_LOCATION_TYPE_DEVICE);
			verify(&items[i]);
		}
	}
	CHECK(double_out(device, 40 << 20) >= 40 << 20);
	double_agree(device);
	for (size_t i = 0; i < SIZES; i++) {
		verify(&items[i]);
		CHECK(cuMemFree_v2(items[i].address + 1) == CUDA_ERROR_INVALID_VALUE);
		CHECK(cuMemFree_v2(items[i].address) == CUDA_SUCCESS);
		CHECK(cuMemFree_v2(items[i].address) == CUDA_ERROR_INVALID_VALUE);
		double_agree(device);
	}
	/* One empty chunk for small ones is kept, and what the pool keeps. */
	CHECK(device->swapped <= GG_CHUNK);
	CHECK(device->resident + device->swapped == pool_kept(device) + GG_CHUNK);
	CHECK(cuMemAlloc_v2(&base, 0) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemAlloc_v2(NULL, 8) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemFree_v2(0) == CUDA_SUCCESS);
}

/* A limit, while allocating: older memory goes to the host. */
static void test_limit(void)
{
	struct item items[12];
	size_t free_bytes, total;

	start();
	double_limit(48 << 20);
	for (int i = 0; i < 12; i++) {
		items[i] = (struct item){ .bytes = 8 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
		CHECK(device->resident <= 48 << 20);
		double_agree(device);
	}
	CHECK(cuMemGetInfo_v2(&free_bytes, &total) == CUDA_SUCCESS && total == 48 << 20 && free_bytes == 0);
	CHECK(cuDeviceTotalMem_v2(&total, 0) == CUDA_SUCCESS && total == 48 << 20);
	CHECK(device->swapped == 48 << 20);
	for (int i = 0; i < 12; i++)
		verify(&items[i]);
	double_limit(UINT64_MAX);
	CHECK(device->swapped == 0);
	double_agree(device);
	double_limit(10 << 20);
	for (int i = 0; i < 12; i++) {
		verify(&items[i]);
		CHECK(cuMemFree_v2(items[i].address) == CUDA_SUCCESS);
	}
	double_agree(device);
	CHECK(device->swapped == 0);
}

/* gmem.swap.max 0 */
static void test_no_swap(void)
{
	CUdeviceptr one, two;

	start();
	double_swap(false);
	double_limit(10 << 20);
	CHECK(cuMemAlloc_v2(&one, 8 << 20) == CUDA_SUCCESS);
	two = 7;
	CHECK(cuMemAlloc_v2(&two, 4 << 20) == CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(two == 7);
	double_agree(device);
	CHECK(cuMemAlloc_v2(&two, 2 << 20) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(one) == CUDA_SUCCESS && cuMemFree_v2(two) == CUDA_SUCCESS);
	double_agree(device);
}

/* More than the GPU has: FAKE_MEMORY is 64 MiB. What is cached of other sizes makes room. */
static void test_exhaustion(void)
{
	CUdeviceptr address[40];
	int count = 0;

	start();
	while (count < 40 && cuMemAlloc_v2(&address[count], 2 << 20) == CUDA_SUCCESS)
		count++;
	CHECK(count == 32);
	double_agree(device);
	for (int i = 0; i < count; i++)
		CHECK(cuMemFree_v2(address[i]) == CUDA_SUCCESS);
	double_agree(device);
	CHECK(cuMemAlloc_v2(&address[0], 64 << 20) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&address[1], 1) == CUDA_ERROR_OUT_OF_MEMORY);
	double_agree(device);
	CHECK(cuMemFree_v2(address[0]) == CUDA_SUCCESS);
	/* From the cache: no call that makes anything. */
	CHECK(pool_kept(device) == 64 << 20);
	CHECK(cuMemAlloc_v2(&address[0], 64 << 20) == CUDA_SUCCESS);
	CHECK(pool_kept(device) == 0);
	CHECK(cuMemFree_v2(address[0]) == CUDA_SUCCESS);
	double_agree(device);
}

/* Any fault, once: errors are fine, lost data and wrong books are not. */
static void test_faults(void)
{
	struct item items[4] = { { .bytes = 8 << 20 }, { .bytes = 3 << 20 }, { .bytes = 3000 }, { .bytes = 2 << 20 } };
	CUdeviceptr gone = 0;
	CUipcMemHandle ipc;

	start();
	for (int i = 0; i < 4; i++) {
		items[i].seed = (uint64_t)i;
		if (cuMemAlloc_v2(&items[i].address, items[i].bytes) != CUDA_SUCCESS)
			CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		double_agree(device);
		fill(&items[i]);
	}
	for (int round = 0; round < 3; round++) {
		double_out(device, round == 1 ? 4 << 20 : 60 << 20);
		double_agree(device);
		for (int i = 0; i < 4; i++) {
			verify(&items[i]);
			items[i].seed += 10;
			fill(&items[i]);
		}
		double_in(device, UINT64_MAX);
		double_agree(device);
		for (int i = 0; i < 4; i++)
			verify(&items[i]);
		/* Something comes and goes in between. */
		if (cuMemAllocAsync(&gone, 3 << 20, NULL) == CUDA_SUCCESS && cuMemFreeAsync(gone, NULL) != CUDA_SUCCESS)
			CHECK(cuMemFree_v2(gone) == CUDA_SUCCESS);
		real.cuCtxSynchronize();
		parked_sweep(true);
		double_agree(device);
	}
	double_out(device, 6 << 20);
	double_exchange(device, 4 << 20);
	double_agree(device);
	/* What is exported changes its chunks. */
	if (cuIpcGetMemHandle(&ipc, items[1].address) != CUDA_SUCCESS) {
		verify(&items[1]);
		double_agree(device);
		CHECK(cuIpcGetMemHandle(&ipc, items[1].address) == CUDA_SUCCESS);
	}
	double_agree(device);
	for (int i = 0; i < 4; i++) {
		verify(&items[i]);
		if (cuMemFree_v2(items[i].address) != CUDA_SUCCESS)
			CHECK(cuMemFree_v2(items[i].address) == CUDA_SUCCESS);
		double_agree(device);
	}
	ours_enter();
	pool_trim(device, 0);
	ours_leave();
	double_agree(device);
	CHECK(device->resident + device->swapped <= GG_CHUNK + pool_credited(device));
}

/* "Kernels" that count in memory while it moves: each adds 1 to every word of its buffer. */

const size_t add_one_parameters[] = { sizeof(CUdeviceptr), sizeof(size_t), 0 };
void add_one(void **parameters);
void add_one(void **parameters)
{
	uint64_t *words = *(uint64_t **)parameters[0];
	const size_t count = *(size_t *)parameters[1];

	for (size_t i = 0; i < count; i++)
		words[i]++;
}

static CUfunction kernel(const char *name)
{
	CUmodule module;
	CUfunction function;

	__typeof__(&cuModuleLoadData) load = (__typeof__(load))plain("cuModuleLoadData");
	__typeof__(&cuModuleGetFunction) get = (__typeof__(get))plain("cuModuleGetFunction");

	CHECK(load(&module, "") == CUDA_SUCCESS && get(&function, module, name) == CUDA_SUCCESS);
	return function;
}

static CUresult launch(CUfunction function, CUstream stream, void **parameters)
{
	return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

static bool stop; /* atomically */

static void *worker(void *argument)
{
	const uintptr_t number = (uintptr_t)argument;
	CUfunction function;
	CUstream stream;
	uint64_t seed = number * 7 + 1;

	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	function = kernel("add_one");
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		CUdeviceptr address;
		size_t bytes, count, rounds;
		uint64_t *result;

		seed = seed * UINT64_C(6364136223846793005) + 1;
		bytes = (seed >> 33) % 3 == 0 ? 8 + (seed >> 40) % 4000 * 8 : (1 + (seed >> 40) % 9) << 20;
		rounds = 1 + (seed >> 50) % 30;
		count = bytes / 8;
		if ((seed >> 45) & 1)
			CHECK(cuMemAlloc_v2(&address, bytes) == CUDA_SUCCESS);
		else
			CHECK(cuMemAllocAsync(&address, bytes, stream) == CUDA_SUCCESS);
		CHECK(cuMemsetD8Async(address, 0, bytes, stream) == CUDA_SUCCESS);
		for (size_t i = 0; i < rounds; i++) {
			void *parameters[] = { &address, &count };

			CHECK(launch(function, stream, parameters) == CUDA_SUCCESS);
		}
		result = malloc(bytes);
		CHECK(cuMemcpyDtoHAsync_v2(result, address, bytes, stream) == CUDA_SUCCESS);
		CHECK(real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
		for (size_t i = 0; i < count; i++)
			CHECK(result[i] == rounds);
		free(result);
		if ((seed >> 46) & 1)
			CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
		else if (cuMemFreeAsync(address, stream) != CUDA_SUCCESS)
			CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	}
	return NULL;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void test_stress(void)
{
	const char *text = getenv("UNIT_SECONDS");
	const double until = now() + (text ? atof(text) : 3);
	pthread_t threads[3];
	struct item still = { .bytes = 30 << 20, .seed = 5 };

	start();
	CHECK(cuMemAlloc_v2(&still.address, still.bytes) == CUDA_SUCCESS);
	fill(&still);
	for (uintptr_t i = 0; i < 3; i++)
		CHECK(!pthread_create(&threads[i], NULL, worker, (void *)i));
	/* On a machine that is busy elsewhere it takes longer to have seen anything. */
	while (now() < until || double_reclaims() <= 10) {
		double_limit((2 + any(60)) << 20);
		pick_look(device, any(2));
		if (any(2))
			double_exchange(device, (2 + any(20)) << 20);
		if (!any(4))
			double_limit(UINT64_MAX);
		if (!any(4))
			keeper_grant(device, any(3) ? any(80) << 20 : UINT64_MAX);
		/* Looks from a third thread, at what is being freed too. */
		for (int i = 0; i < 1000; i++) {
			CUdeviceptr base;
			size_t bytes;
			struct device *found;

			pages_use_from(still.address + any(100 << 20) - (50 << 20));
			if (!any(100))
				pages_use(still.address, 10 << 20);
			region_find(still.address + any(100 << 20) - (50 << 20), &base, &bytes, &found);
		}
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	double_limit(UINT64_MAX);
	verify(&still);
	real.cuCtxSynchronize();
	parked_sweep(true);
	double_agree(device);
	CHECK(cuMemFree_v2(still.address) == CUDA_SUCCESS);
	double_agree(device);
	CHECK(double_reclaims() > 10);
	printf("%u reclaims\n", double_reclaims());
}

/* A kernel that does not end until it is told. */

static bool ended; /* atomically */
void forever(void **parameters);
void forever(void **parameters)
{
	(void)parameters;
	while (!__atomic_load_n(&ended, __ATOMIC_RELAXED))
		usleep(1000);
}

static void test_persistent(void)
{
	struct item item = { .bytes = 8 << 20, .seed = 3 };
	CUstream stream;
	double before;

	start();
	device->mover->work_us = 300000;
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	fill(&item);
	CHECK(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	CHECK(launch(kernel("forever"), stream, NULL) == CUDA_SUCCESS);
	before = now();
	CHECK(double_out(device, 8 << 20) == 0);
	CHECK(now() - before < 20);	/* it gives up; how soon is a matter of the load */
	CHECK(double_out(device, 8 << 20) == 0);	/* the waiting thread is still at it */
	double_agree(device);
	fill(&item);	/* the gate is open */
	verify(&item);
	__atomic_store_n(&ended, true, __ATOMIC_RELAXED);
	CHECK(real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
	device->mover->work_us = 60000000;
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	double_agree(device);
	verify(&item);
	CHECK(cuMemFree_v2(item.address) == CUDA_SUCCESS);
}

/* A queue that takes longer than any caller waits for one kernel: it gets done, so it is waited for. */

void slow(void **parameters);
void slow(void **parameters)
{
	(void)parameters;
	usleep(150000);
}

static void nobody_sleeps(void)
{
}

static void test_queue(void)
{
	struct item item = { .bytes = 8 << 20, .seed = 3 };

	start();
	device->mover->work_us = 300000;
	counters_wake = nobody_sleeps;	/* as with a daemon: what finishes is looked at */
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	fill(&item);
	for (int i = 0; i < 6; i++) {
		CHECK(launch(kernel("slow"), NULL, NULL) == CUDA_SUCCESS);
		usleep(5000);
	}
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	double_agree(device);
	verify(&item);
	CHECK(cuMemFree_v2(item.address) == CUDA_SUCCESS);
}

/* A synchronous copy is inside the gate until what is queued before it has run: that is waited for, and what is then
 * asked of the gate is not begun anew each time. */

/* Longer than the gate is waited for where nothing is known of those inside, us. */
#define INSIDE_US 100000

static CUdeviceptr copied_from; /* of the thread that copies */

static void *copy_from_it(void *unused)
{
	uint64_t word;

	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	for (int i = 0; i < 6; i++) {
		CHECK(launch(kernel("slow"), NULL, NULL) == CUDA_SUCCESS);
		usleep(5000);
	}
	CHECK(cuMemcpyDtoH_v2(&word, copied_from, sizeof(word)) == CUDA_SUCCESS);
	return unused;
}

static void test_inside(void)
{
	struct item item = { .bytes = 8 << 20, .seed = 3 };
	pthread_t thread;

	start();
	device->mover->work_us = 20000000;	/* of nothing that ends: a busy machine is slow */
	counters_wake = nobody_sleeps;
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	fill(&item);
	copied_from = item.address;
	for (int round = 0; round < 2; round++) {
		CHECK(!pthread_create(&thread, NULL, copy_from_it, NULL));
		while (gate_pass(INSIDE_US))
			;
		CHECK((round ? double_in(device, UINT64_MAX) : double_out(device, 8 << 20)) == 8 << 20);
		pthread_join(thread, NULL);
		double_agree(device);
		verify(&item);
	}
	CHECK(cuMemFree_v2(item.address) == CUDA_SUCCESS);
}

/* Kernels each of which takes longer than is waited for at first: the wait grows, between rests, until one is short
 * enough. Each try begins with one of them, so that chance has no part. */

static uint64_t long_begun; /* atomically */
static bool long_enough; /* atomically */
void longer(void **parameters);
void longer(void **parameters)
{
	(void)parameters;
	__atomic_add_fetch(&long_begun, 1, __ATOMIC_SEQ_CST);
	usleep(700000);
}

static void *run_long(void *unused)
{
	CUfunction function;

	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	function = kernel("longer");
	while (!__atomic_load_n(&long_enough, __ATOMIC_SEQ_CST)) {
		CHECK(launch(function, NULL, NULL) == CUDA_SUCCESS);
		CHECK(cuCtxSynchronize() == CUDA_SUCCESS);
	}
	return unused;
}

static void test_long(void)
{
	struct item item = { .bytes = 8 << 20, .seed = 3 };
	const double until = now() + 120;
	uint64_t moved = 0, seen;
	unsigned int vain = 0;
	pthread_t thread;

	start();
	device->mover->work_us = 300000;
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	fill(&item);
	CHECK(!pthread_create(&thread, NULL, run_long, NULL));
	while (!moved && now() < until) {
		seen = __atomic_load_n(&long_begun, __ATOMIC_SEQ_CST);
		while (__atomic_load_n(&long_begun, __ATOMIC_SEQ_CST) == seen)
			usleep(1000);
		if (calm_rests(device))
			continue;	/* the program has it to itself */
		moved = double_out(device, 8 << 20);
		vain += !moved;
		CHECK(moved || calm_rests(device));
	}
	CHECK(moved == 8 << 20 && vain);
	CHECK(!calm_rests(device));
	__atomic_store_n(&long_enough, true, __ATOMIC_SEQ_CST);
	pthread_join(thread, NULL);
	double_agree(device);
	verify(&item);
}

/* A queue that takes longer than all that is waited for: the program gets less far ahead of the GPU, and then it is
 * short. */

/* Kernels that it has in its queue where none bounds that: 9 s. */
#define QUEUED 60

static void *run_ahead(void *unused)
{
	CUfunction function;

	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	function = kernel("slow");
	while (!__atomic_load_n(&long_enough, __ATOMIC_SEQ_CST)) {
		uint64_t submitted, finished;

		CHECK(launch(function, NULL, NULL) == CUDA_SUCCESS);
		totals_get(device, &submitted, &finished);
		while (submitted - finished > QUEUED && !__atomic_load_n(&long_enough, __ATOMIC_SEQ_CST)) {
			usleep(1000);
			totals_get(device, &submitted, &finished);
		}
		/* A marker behind each. */
		usleep(3000);
	}
	return unused;
}

static void *look_at_markers(void *unused)
{
	ours_enter();
	while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
		counters_tick();
		usleep(2000);
	}
	return unused;
}

static void test_ahead_of_it(void)
{
	struct item item = { .bytes = 8 << 20, .seed = 3 };
	const double until = now() + 60;
	pthread_t thread, looks;
	uint64_t moved = 0, usec, submitted = 0, finished = 0;
	unsigned int vain = 0;

	start();
	device->mover->work_us = 300000;
	counters_wake = nobody_sleeps;
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	fill(&item);
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	CHECK(!pthread_create(&looks, NULL, look_at_markers, NULL));
	CHECK(!pthread_create(&thread, NULL, run_ahead, NULL));
	while (submitted - finished < QUEUED)
		totals_get(device, &submitted, &finished);
	/* As the listening thread does. */
	while (!moved && now() < until) {
		if (calm_rests(device)) {
			usleep(10000);
			continue;
		}
		moved = mover_in(device, 8 << 20, &usec);
		vain += !moved;
	}
	CHECK(moved == 8 << 20 && vain);
	totals_get(device, &submitted, &finished);
	CHECK(submitted - finished < QUEUED / 2);
	__atomic_store_n(&long_enough, true, __ATOMIC_SEQ_CST);
	pthread_join(thread, NULL);
	__atomic_store_n(&stop, true, __ATOMIC_SEQ_CST);
	pthread_join(looks, NULL);
	double_agree(device);
	verify(&item);
}

/* A thread that destroys a context comes to wait, inside, for what is about to move: that does not then. Neither waits
 * for as long as the other may take. */

static void *destroy(void *other)
{
	CHECK(cuCtxDestroy_v2((CUcontext)other) == CUDA_SUCCESS);
	return NULL;
}

static void test_destroyed(void)
{
	struct item item = { .bytes = 8 << 20, .seed = 3 };
	CUcontext other;
	pthread_t thread;
	double before;

	start();
	CHECK(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	for (int i = 0; i < 6; i++)
		CHECK(launch(kernel("slow"), NULL, NULL) == CUDA_SUCCESS);
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(!pthread_create(&thread, NULL, destroy, other));
	while (gate_pass(INSIDE_US))
		;
	before = now();
	CHECK(double_out(device, UINT64_MAX) == 0);
	CHECK(now() - before < 30);	/* of the minute that it may take */
	pthread_join(thread, NULL);
	CHECK(device->swapped == 0 && device->resident == pool_kept(device));
	double_agree(device);
}

/* The GPU is taken away while a copy is under way: it is given up, and nothing of it is touched before it
 * has ended. */

static void *free_it(void *argument)
{
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(*(CUdeviceptr *)argument) == CUDA_SUCCESS);
	return NULL;
}

static void test_stuck(void)
{
	struct item items[2] = { { .bytes = 4 << 20, .seed = 1 }, { .bytes = 6 << 20, .seed = 2 } };
	void (*hold)(bool);
	pthread_t thread;
	double before;

	start();
	hold = (void (*)(bool))plain("fake_memory_hold");
	for (int round = 0; round < 2; round++) {
		device->mover->copy_us = 60000000;
		for (int i = 0; i < 2; i++) {
			CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
			fill(&items[i]);
		}
		if (round)	/* on the way back */
			CHECK(double_out(device, UINT64_MAX) == 10 << 20);
		hold(true);
		device->mover->copy_us = 1000000;
		before = now();
		CHECK((round ? double_in(device, UINT64_MAX) : double_out(device, UINT64_MAX)) == 0);
		CHECK(now() - before < 20);
		device->mover->copy_us = 60000000;
		CHECK((round ? double_in(device, UINT64_MAX) : double_out(device, UINT64_MAX)) == 0);
		for (int i = 0; i < 2; i++) {
			verify(&items[i]);	/* the gate is open, and all is in its place */
			items[i].seed += 10;
			fill(&items[i]);
		}
		CHECK(!pthread_create(&thread, NULL, free_it, &items[0].address));
		usleep(50000);
		hold(false);
		pthread_join(thread, NULL);
		verify(&items[1]);
		CHECK((round ? double_in(device, UINT64_MAX) : double_out(device, UINT64_MAX)) == 6 << 20);
		verify(&items[1]);
		CHECK(cuMemFree_v2(items[1].address) == CUDA_SUCCESS);
		double_agree(device);
	}
}

/* The copy that was given up goes with the context that it runs in, and what waits for it does not wait for another. */

static CUcontext current_there;

static void *reset_primary(void *unused)
{
	CHECK(real.cuCtxSetCurrent(current_there) == CUDA_SUCCESS);
	CHECK(cuDevicePrimaryCtxReset_v2(0) == CUDA_SUCCESS);
	return unused;
}

static void *free_item(void *address)
{
	CHECK(real.cuCtxSetCurrent(current_there) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(*(CUdeviceptr *)address) == CUDA_SUCCESS);
	return NULL;
}

/* Does it in a thread, which comes to its end. */
static void finish(void *(*what)(void *), void *argument)
{
	struct timespec until;
	pthread_t thread;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 60;
	CHECK(!pthread_create(&thread, NULL, what, argument));
	CHECK(!pthread_timedjoin_np(thread, NULL, &until));
}

/* `lasting`: what is copied is of another context, whose thread frees it afterwards. */
static void stuck_and_gone(bool lasting)
{
	struct item item = { .bytes = 6 << 20, .seed = 1 };
	CUcontext other;
	void (*hold)(bool);

	start();
	hold = (void (*)(bool))plain("fake_memory_hold");
	CHECK(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS);
	current_there = lasting ? other : context;
	CHECK(real.cuCtxSetCurrent(current_there) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	fill(&item);
	hold(true);
	device->mover->copy_us = 1000;
	CHECK(double_out(device, UINT64_MAX) == 0 && device->mover->stuck[0]);
	device->mover->copy_us = 60000000;
	hold(false);
	finish(reset_primary, NULL);
	if (lasting)
		finish(free_item, &item.address);
	CHECK(!device->mover->stuck[0] && device->swapped == 0 && device->resident == pool_kept(device));
	double_agree(device);
}

static void test_stuck_goes(void)
{
	stuck_and_gone(false);
}

static void test_stuck_stays(void)
{
	stuck_and_gone(true);
}

/* cuMemFreeAsync: not before the stream is there; the same stream has it back at once. */
static void test_async(void)
{
	CUdeviceptr one, two, three;
	CUstream stream, other;
	uint64_t value = 0;
	CUmemoryPool pool;
	cuuint64_t used;

	start();
	CHECK(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	CHECK(real.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	CHECK(cuMemAllocAsync(&one, 8 << 20, stream) == CUDA_SUCCESS);
	CHECK(real.cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS);
	CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) == CUDA_SUCCESS && used == 8 << 20);
	CHECK(launch(kernel("forever"), stream, NULL) == CUDA_SUCCESS);
	CHECK(cuMemsetD32Async(one, 7, 4, stream) == CUDA_SUCCESS);
	CHECK(cuMemFreeAsync(one, stream) == CUDA_SUCCESS);
	CHECK(cuMemFreeAsync(one, stream) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemFree_v2(one) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) == CUDA_SUCCESS && used == 0);
	/* Another stream must not have it: the fill has not happened. */
	CHECK(cuMemAllocAsync(&two, 8 << 20, other) == CUDA_SUCCESS && two != one);
	CHECK(cuMemAllocAsync(&three, 8 << 20, stream) == CUDA_SUCCESS && three == one);
	CHECK(cuMemsetD32Async(three, 9, 4, stream) == CUDA_SUCCESS);
	CHECK(cuMemFreeAsync(three, stream) == CUDA_SUCCESS);
	double_agree(device);
	__atomic_store_n(&ended, true, __ATOMIC_RELAXED);
	CHECK(real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
	CHECK(cuMemFreeAsync(two, other) == CUDA_SUCCESS);
	CHECK(real.cuStreamSynchronize(other) == CUDA_SUCCESS);
	parked_sweep(false);
	CUdeviceptr base;
	CHECK(cuMemGetAddressRange_v2(&base, NULL, one) != CUDA_SUCCESS);
	CHECK(cuMemGetAddressRange_v2(&base, NULL, two) != CUDA_SUCCESS);
	CHECK(device->resident == pool_kept(device));
	double_agree(device);
	/* cuMemFree may free what was allocated in order of a stream. */
	CHECK(cuMemAllocAsync(&one, 1000, NULL) == CUDA_SUCCESS);
	CHECK(cuMemcpyHtoD_v2(one, &value, 8) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(one) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(one) == CUDA_ERROR_INVALID_VALUE);
	/* What cuMemAlloc gave is not for cuMemFreeAsync. */
	CHECK(cuMemAlloc_v2(&one, 1000) == CUDA_SUCCESS);
	CHECK(cuMemFreeAsync(one, NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemFree_v2(one) == CUDA_SUCCESS);
	double_agree(device);
}

/* A second context uses the memory of the first, keeps the mover waiting, and takes its own along when it goes. */
static void test_contexts(void)
{
	CUdeviceptr first, second, small;
	CUcontext other;
	uint64_t resident;
	double before;

	start();
	CHECK(cuMemAlloc_v2(&first, 6 << 20) == CUDA_SUCCESS);
	CHECK(cuMemsetD8_v2(first, 1, 6 << 20) == CUDA_SUCCESS);
	resident = device->resident;
	CHECK(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS);
	CHECK(device_current() == device);
	CHECK(cuMemAlloc_v2(&second, 4 << 20) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&small, 100) == CUDA_SUCCESS);
	CHECK(cuMemsetD8_v2(first, 2, 6 << 20) == CUDA_SUCCESS);
	CHECK(launch(kernel("forever"), NULL, NULL) == CUDA_SUCCESS);
	device->mover->work_us = 300000;
	before = now();
	CHECK(double_out(device, 2 << 20) == 0);
	CHECK(now() - before > 0.2);
	device->mover->work_us = 60000000;
	__atomic_store_n(&ended, true, __ATOMIC_RELAXED);
	CHECK(real.cuCtxSynchronize() == CUDA_SUCCESS);
	CHECK(double_out(device, UINT64_MAX) == 12 << 20);
	double_agree(device);
	CHECK(cuCtxDestroy_v2(other) == CUDA_SUCCESS);
	double_agree(device);
	CHECK(device->resident == 0 && device->swapped == resident);
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(second) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemFree_v2(small) == CUDA_ERROR_INVALID_VALUE);
	CHECK(double_in(device, UINT64_MAX) == resident);
	CHECK(cuMemFree_v2(first) == CUDA_SUCCESS);
	double_agree(device);
}

/* What is pinned stays, and comes back to be pinned. */
static void test_pin(void)
{
	struct item items[3];

	start();
	for (int i = 0; i < 3; i++) {
		items[i] = (struct item){ .bytes = 6 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	CHECK(double_out(device, UINT64_MAX) == 18 << 20);
	CHECK(pin_range(items[1].address + 10, 1) == CUDA_SUCCESS);
	CHECK(place(items[1].address) == CU_MEM_LOCATION_TYPE_DEVICE);
	CHECK(place(items[1].address + (2 << 20)) == CU_MEM_LOCATION_TYPE_HOST_NUMA);
	CHECK(tree_pinned(device) == GG_CHUNK && device->foreign == GG_CHUNK);
	double_agree(device);
	CHECK(double_in(device, UINT64_MAX) == 16 << 20);
	CHECK(double_out(device, UINT64_MAX) == 16 << 20);
	CHECK(place(items[1].address) == CU_MEM_LOCATION_TYPE_DEVICE);
	for (int i = 0; i < 3; i++) {
		verify(&items[i]);
		CHECK(cuMemFree_v2(items[i].address) == CUDA_SUCCESS);
	}
	CHECK(device->foreign == 0 && tree_pinned(device) == 0);
	double_agree(device);
	CHECK(pin_range(items[1].address, 1) == CUDA_ERROR_INVALID_VALUE);
}

/* What something outside may still reach after it is freed goes to the driver, which has that let go; no other gets
 * it. */
static void test_reached(void)
{
	CUdeviceptr address;
	int fd;

	start();
	CHECK(cuMemAlloc_v2(&address, 4 << 20) == CUDA_SUCCESS && cuMemFree_v2(address) == CUDA_SUCCESS);
	CHECK(pool_kept(device) == 4 << 20);
	CHECK(cuMemAlloc_v2(&address, 4 << 20) == CUDA_SUCCESS && pool_kept(device) == 0);
	CHECK(cuMemGetHandleForAddressRange(&fd, address, 2 << 20, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) ==
	      CUDA_SUCCESS);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	CHECK(pool_kept(device) == 2 << 20 && device->resident == 2 << 20);
	double_agree(device);
}

static void use(CUdeviceptr address, int times)
{
	while (times--)
		pages_use_from(address);
}

static bool on_gpu(CUdeviceptr address)
{
	return place(address) == CU_MEM_LOCATION_TYPE_DEVICE;
}

/* The cold ones go first, and the hot ones come back first: by how often, not by whether. */
static void test_heat(void)
{
	CUdeviceptr address[8];

	start();
	for (int i = 0; i < 8; i++)
		CHECK(cuMemAlloc_v2(&address[i], 2 << 20) == CUDA_SUCCESS);
	for (int i = 0; i < 8; i++)
		use(address[i], i % 2 ? 1 : 7);
	CHECK(!pick_look(device, false));	/* too few to tell */
	use(address[0], 1);
	CHECK(pick_look(device, false));
	CHECK(double_out(device, 6 << 20) == 6 << 20);
	for (int i = 0; i < 8; i += 2)
		CHECK(on_gpu(address[i]));
	CHECK(double_out(device, UINT64_MAX) == 10 << 20);
	for (int i = 0; i < 8; i++)
		use(address[i], i == 3 || i == 5 ? 100 : 1);
	CHECK(pick_look(device, false));
	CHECK(double_in(device, 4 << 20) == 4 << 20);
	for (int i = 0; i < 8; i++)
		CHECK(on_gpu(address[i]) == (i == 5 || i == 3));
	/* Old heat goes by itself. */
	for (int i = 0; i < 8; i++)
		CHECK(pick_look(device, true));
	use(address[0], 10);
	CHECK(pick_look(device, true) && double_in(device, 2 << 20) == 2 << 20 && on_gpu(address[0]));
	double_agree(device);
}

/* A pointer tells where something begins: it is hot up to where something else does. */
static void test_heat_in_one(void)
{
	CUdeviceptr address;

	start();
	CHECK(cuMemAlloc_v2(&address, 12 << 20) == CUDA_SUCCESS);
	use(address + 100, 1);
	use(address + (4 << 20), 20);	/* pages 2 and 3 */
	use(address + (8 << 20), 2);
	CHECK(pick_look(device, false));
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	for (int i = 0; i < 6; i++)
		CHECK(on_gpu(address + ((CUdeviceptr)i << 21)) == (i == 2 || i == 3));
	CHECK(double_in(device, UINT64_MAX) == 8 << 20);
	/* What ends is known of copies: page 2 is not theirs. */
	for (int i = 0; i < 20; i++)
		pages_use(address, 4 << 20);
	CHECK(pick_look(device, false) && pick_look(device, true) && pick_look(device, true));
	for (int i = 0; i < 9; i++)
		pages_use(address, 4 << 20);
	CHECK(pick_look(device, false));
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	CHECK(on_gpu(address) && on_gpu(address + (2 << 20)));
	/* What was seen to begin long ago begins no longer: all of it is hot by its first page. */
	for (int i = 0; i < 20; i++)
		CHECK(pick_look(device, true));
	use(address, 20);
	CHECK(pick_look(device, false));
	CHECK(pick_misplaced(device, UINT64_MAX) == 0);
	double_agree(device);
}

/* What is copied begins once: all of it is as hot as what works on it is told at its first page. */
static void test_heat_copied(void)
{
	CUdeviceptr copied, other;

	start();
	CHECK(cuMemAlloc_v2(&copied, 8 << 20) == CUDA_SUCCESS && cuMemAlloc_v2(&other, 8 << 20) == CUDA_SUCCESS);
	pages_use(copied, 8 << 20);
	for (int round = 0; round < 3; round++) {
		use(copied, 20);
		use(other, 10);
		CHECK(pick_look(device, false));
	}
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	for (CUdeviceptr at = 0; at < 8 << 20; at += 2 << 20)
		CHECK(on_gpu(copied + at) && !on_gpu(other + at));
	double_agree(device);
}

/* Whether exactly those are on the GPU: a digit each. */
static bool are_on_gpu(const CUdeviceptr address[8], const char *which)
{
	for (int i = 0; i < 8; i++)
		if (on_gpu(address[i]) != (strchr(which, '0' + i) != NULL))
			return false;
	return true;
}

/* Microseconds. */
#define A_SECOND 1000000

static void sums_are(uint64_t used, uint64_t resident)
{
	uint64_t now_used, now_resident;

	order_sums(device, &now_used, &now_resident);
	CHECK(now_used == used << 20 && now_resident == resident << 20);
}

static void misses_are(uint64_t missed, uint64_t over)
{
	uint64_t now_missed, now_over;

	order_misses(device, &now_missed, &now_over);
	CHECK(now_missed == missed << 20 && now_over == over << 20);
}

/* The working set comes in the order of its first use, and goes in the reverse; what is not in it goes before and does
 * not come. */
static void test_order(void)
{
	CUdeviceptr address[8];
	bool drained;

	start();
	for (int i = 0; i < 8; i++)
		CHECK(cuMemAlloc_v2(&address[i], 2 << 20) == CUDA_SUCCESS);
	sums_are(0, 0);
	use(address[2], 1);
	order_begin(device);	/* that was before */
	for (const char *of = "5317351"; *of; of++)
		use(address[*of - '0'], 1);
	sums_are(0, 0);
	order_learn(device, A_SECOND);
	sums_are(8, 8);
	misses_are(0, 0);	/* of the first turn nothing was told */
	CHECK(double_out(device, UINT64_MAX) == 16 << 20);
	sums_are(8, 0);
	CHECK(double_prepare(device, 1 << 20) == 0);
	CHECK(double_prepare(device, 4 << 20) == 4 << 20 && are_on_gpu(address, "53"));
	CHECK(double_prepare(device, 3 << 20) == 2 << 20 && are_on_gpu(address, "531"));
	sums_are(8, 6);
	CHECK(double_prepare(device, UINT64_MAX) == 2 << 20 && are_on_gpu(address, "5317"));
	CHECK(double_in(device, UINT64_MAX) == 8 << 20);
	/* Where there is room for less it is as much of them. */
	CHECK(double_out(device, UINT64_MAX) == 16 << 20);
	double_bound(4 << 20);
	CHECK(double_prepare(device, UINT64_MAX) == 4 << 20 && are_on_gpu(address, "53"));
	double_bound(UINT64_MAX);
	CHECK(double_in(device, UINT64_MAX) == 12 << 20);
	/* A turn in which nothing was used says nothing of the next one. */
	order_learn(device, A_SECOND);
	sums_are(8, 8);
	ours_enter();
	CHECK(!turn_end(device, 60000000, &drained) && drained);
	ours_leave();
	CHECK(double_out(device, 4 << 20) == 4 << 20);
	CHECK(on_gpu(address[5]) && on_gpu(address[3]) && on_gpu(address[1]) && on_gpu(address[7]));
	CHECK(double_out(device, 6 << 20) == 6 << 20 && are_on_gpu(address, "531"));
	CHECK(double_out(device, 2 << 20) == 2 << 20 && are_on_gpu(address, "53"));
	CHECK(double_prepare(device, 2 << 20) == 2 << 20 && are_on_gpu(address, "531"));
	turn_begin(device, 0);
	/* What is freed is no part of it, and what is new is not yet. */
	CHECK(cuMemFree_v2(address[5]) == CUDA_SUCCESS && cuMemAlloc_v2(&address[5], 2 << 20) == CUDA_SUCCESS);
	sums_are(6, 4);
	double_agree(device);
}

/* Turns of less than a second count together: what was used longest ago comes first, and goes last. */
static void test_order_of_short_turns(void)
{
	CUdeviceptr address[8];
	bool drained;

	start();
	for (int i = 0; i < 8; i++)
		CHECK(cuMemAlloc_v2(&address[i], 2 << 20) == CUDA_SUCCESS);
	for (int i = 0; i < 8; i++) {
		use(address[7 - i], 1);
		use(address[0], 1);
		order_learn(device, A_SECOND / 4);
	}
	sums_are(8, 8);		/* of the last four turns: 3, 2, 1, and 0 in each */
	CHECK(double_out(device, UINT64_MAX) == 16 << 20);
	CHECK(double_prepare(device, 2 << 20) == 2 << 20 && are_on_gpu(address, "3"));
	CHECK(double_prepare(device, UINT64_MAX) == 6 << 20 && are_on_gpu(address, "0123"));
	ours_enter();
	CHECK(!turn_end(device, 60000000, &drained) && drained);
	ours_leave();
	CHECK(double_out(device, 2 << 20) == 2 << 20 && are_on_gpu(address, "123"));
	CHECK(double_out(device, 2 << 20) == 2 << 20 && are_on_gpu(address, "23"));
	turn_begin(device, 0);
	double_agree(device);
}

/* Of one allocation those parts are in it that something begins in, up to where something else does; of the large
 * chunks those with such a part. */
static void test_order_in_one(void)
{
	CUdeviceptr address, large;

	start();
	CHECK(cuMemAlloc_v2(&address, 12 << 20) == CUDA_SUCCESS);
	use(address + 100, 1);
	use(address + (4 << 20), 1);
	use(address + (8 << 20), 1);
	order_learn(device, A_SECOND);
	sums_are(12, 12);
	use(address + (4 << 20), 1);
	order_learn(device, A_SECOND);
	sums_are(4, 4);
	misses_are(0, 8);
	/* Of a copy the end is known. */
	pages_use(address, 2 << 20);
	order_learn(device, A_SECOND);
	sums_are(2, 2);
	misses_are(2, 4);
	/* Where nothing was used the last turn stays. */
	order_learn(device, A_SECOND);
	misses_are(2, 4);
	/* What was seen to begin long ago begins no longer. */
	for (int i = 0; i < 20; i++) {
		use(address, 1);
		order_learn(device, A_SECOND);
	}
	sums_are(12, 12);
	CHECK(cuMemAlloc_v2(&large, 100 << 20) == CUDA_SUCCESS);
	pages_use(large + (70 << 20), 2 << 20);
	use(address, 1);
	order_learn(device, A_SECOND);
	sums_are(12 + 16, 12 + 16);
	CHECK(double_out(device, UINT64_MAX) == 112 << 20);
	CHECK(double_prepare(device, 15 << 20) == 12 << 20);	/* the large one is not for so little */
	CHECK(double_prepare(device, UINT64_MAX) == 16 << 20);
	CHECK(on_gpu(large + (70 << 20)) && !on_gpu(large) && !on_gpu(large + (90 << 20)));
	double_agree(device);
}

/* Makes every other one hot. */
static void heat_every_other(const CUdeviceptr address[8])
{
	for (int round = 0; round < 5; round++) {
		for (int i = 0; i < 8; i++)
			use(address[i], i % 2 ? 2 : 40);
		CHECK(pick_look(device, false));
	}
}

/* What is hot in the host comes for what is cold on the GPU, and the books do not notice. */
static void test_exchange(void)
{
	CUdeviceptr address[8];

	start();
	for (int i = 0; i < 8; i++)
		CHECK(cuMemAlloc_v2(&address[i], 2 << 20) == CUDA_SUCCESS);
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	CHECK(pick_misplaced(device, UINT64_MAX) == 0);	/* nothing is known to be better */
	for (int i = 0; i < 8; i++)
		use(address[i], on_gpu(address[i]) ? 6 : 10);
	CHECK(pick_look(device, false) && pick_misplaced(device, UINT64_MAX) == 0);	/* not by enough */
	heat_every_other(address);
	double_limit(8 << 20);
	for (uint64_t rest = pick_misplaced(device, UINT64_MAX); rest; rest = pick_misplaced(device, UINT64_MAX)) {
		CHECK(double_exchange(device, 2 << 20) == 2 << 20);
		CHECK(pick_misplaced(device, UINT64_MAX) == rest - (2 << 20));
		double_agree(device);
	}
	for (int i = 0; i < 8; i++)
		CHECK(on_gpu(address[i]) == !(i % 2));
	CHECK(device->resident == 8 << 20 && device->swapped == 8 << 20);
	/* A program cannot come where none can go. */
	for (int i = 0; i < 8; i += 2)
		CHECK(pin_range(address[i], 1) == CUDA_SUCCESS);
	CHECK(double_exchange(device, 2 << 20) == 0);
	double_agree(device);
}

/* Eight allocations, the first four on the GPU and cold, the others in the host and hot; there is room for four. */
static void misplace(struct item items[8])
{
	start();
	for (int i = 0; i < 8; i++) {
		items[i] = (struct item){ .bytes = 2 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	CHECK(double_out(device, UINT64_MAX) == 16 << 20);
	for (int i = 0; i < 4; i++)
		use(items[i].address, 100);
	CHECK(pick_look(device, false));
	CHECK(double_in(device, 8 << 20) == 8 << 20);
	for (int i = 4; i < 8; i++)
		use(items[i].address, 10000);
	CHECK(pick_look(device, false));
	for (int i = 0; i < 8; i++)
		CHECK(on_gpu(items[i].address) == (i < 4));
	double_limit(8 << 20);
}

static void *exchange_all(void *unused)
{
	CHECK(double_exchange(device, 8 << 20) == 8 << 20);
	return unused;
}

enum { TO_HOST, TO_GPU };

static uint64_t bus(const char *what, int way)
{
	return ((uint64_t (*)(int))plain(what))(way);
}

static void until_bus(const char *what, int way, uint64_t bytes)
{
	while (bus(what, way) < bytes)
		usleep(100);
}

/* In an exchange each way goes on while nothing gets on the other way, as far as there is room: what comes takes no
 * more of the GPU than has gone by then. */
static void test_both_ways(void)
{
	void (*let)(int, uint64_t);
	uint64_t out, in, gpu, host, addresses;
	void (*usage)(int, uint64_t *, uint64_t *, uint64_t *);
	struct item items[8];
	pthread_t thread;

	misplace(items);
	let = (void (*)(int, uint64_t))plain("fake_memory_let");
	usage = (void (*)(int, uint64_t *, uint64_t *, uint64_t *))plain("fake_memory_usage");
	out = bus("fake_memory_carried", TO_HOST);
	in = bus("fake_memory_carried", TO_GPU);
	let(TO_HOST, 1);
	let(TO_GPU, 0);
	CHECK(!pthread_create(&thread, NULL, exchange_all, NULL));
	/* One has gone: one is on its way, and no more. */
	until_bus("fake_memory_submitted", TO_GPU, in + (2 << 20));
	CHECK(bus("fake_memory_submitted", TO_HOST) == out + (8 << 20));
	usleep(20000);
	CHECK(bus("fake_memory_submitted", TO_GPU) == in + (2 << 20));
	CHECK(bus("fake_memory_carried", TO_HOST) == out + (2 << 20));
	/* What goes does not wait for what comes. */
	let(TO_HOST, 2);
	until_bus("fake_memory_carried", TO_HOST, out + (6 << 20));
	until_bus("fake_memory_submitted", TO_GPU, in + (6 << 20));
	CHECK(bus("fake_memory_carried", TO_GPU) == in);
	usage(0, &gpu, &host, &addresses);
	CHECK(gpu <= 8 << 20);
	/* Nor that for what goes. */
	let(TO_GPU, 3);
	until_bus("fake_memory_carried", TO_GPU, in + (6 << 20));
	CHECK(bus("fake_memory_carried", TO_HOST) == out + (6 << 20));
	let(TO_HOST, UINT64_MAX);
	let(TO_GPU, UINT64_MAX);
	CHECK(!pthread_join(thread, NULL));
	for (int i = 0; i < 8; i++) {
		CHECK(on_gpu(items[i].address) == (i >= 4));
		verify(&items[i]);
	}
	CHECK(device->resident == 8 << 20 && device->swapped == 8 << 20 && pool_credited(device) == 0);
	double_agree(device);
}

static void *out_all(void *unused)
{
	CHECK(double_out(device, 16 << 20) == 16 << 20);
	return unused;
}

/* Between two turns of a program what has gone is freed while the rest is on its way: nothing of it waits for the
 * gate. */
static void test_freed_as_it_goes(void)
{
	void (*let)(int, uint64_t);
	void (*usage)(int, uint64_t *, uint64_t *, uint64_t *);
	uint64_t out, gpu, host, addresses;
	struct item items[8];
	pthread_t thread;
	bool drained;

	start();
	let = (void (*)(int, uint64_t))plain("fake_memory_let");
	usage = (void (*)(int, uint64_t *, uint64_t *, uint64_t *))plain("fake_memory_usage");
	for (int i = 0; i < 8; i++) {
		items[i] = (struct item){ .bytes = 2 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	CHECK(!turn_end(device, 60000000, &drained) && drained);
	out = bus("fake_memory_carried", TO_HOST);
	let(TO_HOST, 3);
	CHECK(!pthread_create(&thread, NULL, out_all, NULL));
	until_bus("fake_memory_carried", TO_HOST, out + (6 << 20));
	do
		usage(0, &gpu, &host, &addresses);
	while (gpu > 10 << 20);
	CHECK(bus("fake_memory_carried", TO_HOST) == out + (6 << 20));
	CHECK(device->resident == 16 << 20);	/* by the books it is there until it is told */
	let(TO_HOST, UINT64_MAX);
	CHECK(!pthread_join(thread, NULL));
	usage(0, &gpu, &host, &addresses);
	CHECK(gpu == 0 && device->resident == 0 && device->swapped == 16 << 20);
	turn_begin(device, 0);
	for (int i = 0; i < 8; i++)
		verify(&items[i]);
	double_agree(device);
}

/* A way whose copies do not end leaves the rest where it was; all of it moves once they have. */
static void test_both_ways_stuck(void)
{
	struct item items[8];
	void (*let)(int, uint64_t);

	misplace(items);
	let = (void (*)(int, uint64_t))plain("fake_memory_let");
	for (int way = 0; way < 2; way++) {
		const uint64_t resident = device->resident;

		let(way, 1);
		device->mover->copy_us = 50000;
		CHECK(double_exchange(device, 8 << 20) < 8 << 20);
		CHECK(device->resident == resident && device->resident + device->swapped == 16 << 20);
		CHECK(double_exchange(device, 8 << 20) == 0);	/* the copy is still there */
		for (int i = 0; i < 8; i++) {
			verify(&items[i]);
			items[i].seed += 10;
			fill(&items[i]);
		}
		device->mover->copy_us = 60000000;
		let(way, UINT64_MAX);
		do
			double_in(device, UINT64_MAX);
		while (device->mover->stuck[TO_HOST] || device->mover->stuck[TO_GPU]);
		double_agree(device);
		CHECK(double_exchange(device, 8 << 20));
		double_in(device, UINT64_MAX);
		double_agree(device);
		for (int i = 0; i < 8; i++)
			verify(&items[i]);
	}
	CHECK(pool_credited(device) == 0);
}

/* ... by itself, and the daemon is told before that memory may be off the GPU: it sees what the driver counts. */
static void test_exchange_by_itself(void)
{
	CUdeviceptr address[8];

	start();
	for (int i = 0; i < 8; i++)
		CHECK(cuMemAlloc_v2(&address[i], 2 << 20) == CUDA_SUCCESS);
	CHECK(double_out(device, 8 << 20) == 8 << 20);
	double_tick(device);
	CHECK(double_away() == 0 && device->exchanged == 0);	/* nothing is known to be better */
	heat_every_other(address);
	double_limit(8 << 20);
	const uint64_t misplaced = pick_misplaced(device, UINT64_MAX);

	CHECK(misplaced);
	for (time_t end = time(NULL) + 60; !device->exchanged && time(NULL) < end; usleep(1000))
		double_tick(device);	/* it takes its time between two looks */
	CHECK(double_away() == misplaced && device->exchanged == misplaced && device->away == 0);
	double_agree(device);
}

/* What goes as a whole is more than is wanted, and the daemon is told that before. What has not come since then it is
 * told of as long as that is so. */
static void test_exchange_whole(void)
{
	const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					   .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	const CUmemAccessDesc access = { .location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	enum { WHOLE = 14 << 20 };	/* chunks of 2 MiB */
	CUmemGenericAllocationHandle handle;
	CUdeviceptr hot, cold;

	start();
	CHECK(cuMemAlloc_v2(&hot, 2 << 20) == CUDA_SUCCESS);
	CHECK(double_out(device, 2 << 20) == 2 << 20);
	CHECK(cuMemCreate(&handle, WHOLE, &prop, 0) == CUDA_SUCCESS);
	CHECK(cuMemAddressReserve(&cold, WHOLE, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cuMemMap(cold, WHOLE, 0, handle, 0) == CUDA_SUCCESS &&
	      cuMemSetAccess(cold, WHOLE, &access, 1) == CUDA_SUCCESS);
	double_limit(WHOLE);
	for (int round = 0; round < 8; round++) {
		use(hot, 40);
		CHECK(pick_look(device, false));
	}
	CHECK(pick_misplaced(device, UINT64_MAX) == 2 << 20);
	for (time_t end = time(NULL) + 60; !double_away() && time(NULL) < end; usleep(1000))
		double_tick(device);
	CHECK(double_away() == WHOLE);
	double_agree(device);
	/* What is owed may come without a word: until it has it is away. */
	CHECK(device->away == mover_owed(device));
	CHECK(double_in(device, UINT64_MAX) + device->exchanged == WHOLE);
	CHECK(mover_owed(device) == 0);
	exchange_settle(device);
	CHECK(device->away == 0 && on_gpu(hot));
	double_agree(device);
}

/* The more is waited for kernels, the more moves at a time; never less than at first, nor more than the daemon
 * believes. */
static void test_exchange_more(void)
{
	const uint64_t least = 256 * GG_MIB;

	CHECK(exchange_next(least, 10, 11) == 2 * least);
	CHECK(exchange_next(2 * least, 10, 1000) == 4 * least);
	CHECK(exchange_next(4 * least, 10, 1000) == 4 * least);
	CHECK(exchange_next(4 * least, 10, 10) == 2 * least);
	CHECK(exchange_next(2 * least, 10, 0) == least);
	CHECK(exchange_next(least, 10, 0) == least);
}

static void test_foreign(void)
{
	const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					   .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE },
					   .allocFlags = { .compressionType = CU_MEM_ALLOCATION_COMP_GENERIC } };
	const CUmemAccessDesc access = { .location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	const CUmemPoolProps pool_props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = prop.location,
					    .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
	const CUDA_ARRAY_DESCRIPTOR array_props = { .Width = 1000, .Height = 1000, .Format = CU_AD_FORMAT_FLOAT,
						    .NumChannels = 1 };
	CUmemGenericAllocationHandle handle, again;
	CUdeviceptr address, managed, elastic;
	CUipcMemHandle ipc;
	CUmemoryPool pool;
	CUarray array;

	start();
	/* Compressed memory cannot move (what can: objects.c). Its handle goes first. */
	CHECK(cuMemCreate(&handle, 4 << 20, &prop, 0) == CUDA_SUCCESS);
	CHECK(device->foreign == 4 << 20 && device->resident == 4 << 20);
	CHECK(cuMemAddressReserve(&address, 4 << 20, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cuMemMap(address, 4 << 20, 0, handle, 0) == CUDA_SUCCESS);
	CHECK(cuMemSetAccess(address, 4 << 20, &access, 1) == CUDA_SUCCESS);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	CHECK(device->foreign == 4 << 20);
	CHECK(double_out(device, UINT64_MAX) == 0);
	CHECK(cuMemRetainAllocationHandle(&again, (void *)address) == CUDA_SUCCESS);
	CHECK(cuMemUnmap(address, 4 << 20) == CUDA_SUCCESS);
	CHECK(device->foreign == 4 << 20);
	double_agree(device);
	CHECK(cuMemRelease(again) == CUDA_SUCCESS);
	CHECK(device->foreign == 0 && device->resident == 0);
	CHECK(cuMemAddressFree(address, 4 << 20) == CUDA_SUCCESS);
	CHECK(cuMemPoolCreate(&pool, &pool_props) == CUDA_SUCCESS);
	CHECK(cuMemAllocFromPoolAsync(&address, 3 << 20, pool, NULL) == CUDA_SUCCESS);
	CHECK(device->foreign == 4 << 20);
	double_agree(device);
	CHECK(cuMemFreeAsync(address, NULL) == CUDA_SUCCESS);
	real.cuCtxSynchronize();
	CHECK(device->foreign == 0);
	CHECK(cuMemPoolDestroy(pool) == CUDA_SUCCESS);
	CHECK(cuMemAllocManaged(&managed, 3 << 20, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS);
	CHECK(device->foreign == 4 << 20 && device->resident == 0);
	CHECK(cuMemFree_v2(managed) == CUDA_SUCCESS);
	CHECK(device->foreign == 0);
	CHECK(cuArrayCreate_v2(&array, &array_props) == CUDA_SUCCESS);
	CHECK(device->foreign == 4 << 20);
	double_agree(device);
	CHECK(cuArrayDestroy(array) == CUDA_SUCCESS);
	CHECK(device->foreign == 0);
	/* What is ours is to the program an allocation of cuMemAlloc. */
	CHECK(cuMemAlloc_v2(&elastic, 3 << 20) == CUDA_SUCCESS);
	CHECK(cuIpcGetMemHandle(&ipc, elastic) == CUDA_SUCCESS && device->foreign == 4 << 20);
	CHECK(cuMemUnmap(elastic, 4 << 20) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemAddressFree(elastic, 4 << 20) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemRetainAllocationHandle(&again, (void *)elastic) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemFree_v2(elastic) == CUDA_SUCCESS);
	double_agree(device);
}

/* What a program asks about an address is the same on the GPU and in the host. */
static void test_attributes(void)
{
	CUpointer_attribute which[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
					CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_HOST_POINTER };
	CUdeviceptr large, small, small2, start_address;
	unsigned long long id[3];
	unsigned int type;
	size_t range;
	void *host = &host;
	CUcontext of;
	bool flag;
	int ordinal;
	void *data[] = { &type, &ordinal, &range, &host };
	size_t pitch;

	start();
	CHECK(cuMemAlloc_v2(&large, 5000000) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&small, 1000) == CUDA_SUCCESS && cuMemAlloc_v2(&small2, 1000) == CUDA_SUCCESS);
	for (int round = 0; round < 2; round++) {
		type = 0;
		CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, small + 999) == CUDA_SUCCESS);
		CHECK(type == CU_MEMORYTYPE_DEVICE);
		CHECK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, large) == CUDA_SUCCESS && of == context);
		CHECK(cuPointerGetAttribute(&flag, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, large) ==
		      CUDA_SUCCESS);
		CHECK(flag);
		CHECK(cuPointerGetAttribute(&start_address, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, small2 + 5) ==
		      CUDA_SUCCESS);
		CHECK(start_address == small2);
		CHECK(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, large) ==
		      CUDA_ERROR_INVALID_VALUE);
		type = 0;
		ordinal = 77;
		host = &host;
		CHECK(cuPointerGetAttributes(4, which, data, large + 4999999) == CUDA_SUCCESS);
		CHECK(type == CU_MEMORYTYPE_DEVICE && ordinal == 0 && range == 5000000 && !host);
		CHECK(cuPointerGetAttribute(&id[0], CU_POINTER_ATTRIBUTE_BUFFER_ID, small) == CUDA_SUCCESS);
		CHECK(cuPointerGetAttribute(&id[1], CU_POINTER_ATTRIBUTE_BUFFER_ID, small2) == CUDA_SUCCESS);
		CHECK(cuPointerGetAttribute(&id[2], CU_POINTER_ATTRIBUTE_BUFFER_ID, large) == CUDA_SUCCESS);
		CHECK(id[0] != id[1] && id[1] != id[2] && id[0] != id[2]);
		if (!round)
			CHECK(double_out(device, UINT64_MAX) == 8 << 20);
	}
	CHECK(cuMemFree_v2(small) == CUDA_SUCCESS && cuMemAlloc_v2(&small, 1000) == CUDA_SUCCESS);
	CHECK(cuPointerGetAttribute(&id[2], CU_POINTER_ATTRIBUTE_BUFFER_ID, small) == CUDA_SUCCESS && id[2] != id[0]);
	CHECK(cuMemAllocPitch_v2(&large, &pitch, 700, 10, 4) == CUDA_SUCCESS && pitch == 1024);
	CHECK(cuMemAllocPitch_v2(&large, &pitch, 700, 10, 5) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemAllocPitch_v2(&large, &pitch, 700, 0, 4) == CUDA_ERROR_INVALID_VALUE);
}

/* While a stream is captured nothing can be waited for, nothing moves, and what is freed goes later. */
static void test_capture(void)
{
	CUdeviceptr one, two;
	CUstream stream;
	CUgraph graph;

	start();
	CHECK(cuMemAlloc_v2(&one, 4 << 20) == CUDA_SUCCESS);
	CHECK(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	CHECK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&two, 4 << 20) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(one) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(one) == CUDA_ERROR_INVALID_VALUE);
	CHECK(double_out(device, UINT64_MAX) == 0);
	CHECK(device->resident == 8 << 20);
	double_agree(device);
	CHECK(cuMemsetD8Async(two, 1, 100, stream) == CUDA_SUCCESS);
	CHECK(cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(two) == CUDA_SUCCESS);
	double_agree(device);
	CHECK(device->resident == pool_kept(device));
}

/* cuCtxEnablePeerAccess; FAKE_DEVICES is 2. */
static void test_peers(void)
{
	CUdeviceptr before, after;
	CUcontext other;
	bool (*accessible)(CUdeviceptr, CUdevice);

	start();
	accessible = (bool (*)(CUdeviceptr, CUdevice))plain("fake_memory_accessible");
	CHECK(cuMemAlloc_v2(&before, 6 << 20) == CUDA_SUCCESS);
	CHECK(double_out(device, 2 << 20) == 2 << 20);
	other = retain(1);
	CHECK(real.cuCtxSetCurrent(other) == CUDA_SUCCESS);
	CHECK(!accessible(before, 1));
	CHECK(cuCtxEnablePeerAccess(context, 0) == CUDA_SUCCESS);
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&after, 4 << 20) == CUDA_SUCCESS);
	for (int i = 0; i < 6; i += 2)
		CHECK(accessible(before + ((uint64_t)i << 20), 1));
	CHECK(accessible(after, 1) && accessible(after, 0));
	CHECK(device->swapped == 2 << 20);	/* what was in the host is still */
	/* It moves as all does, and both have access wherever it is. */
	CHECK(double_out(device, UINT64_MAX) == 8 << 20);
	CHECK(device->foreign == 0 && device->swapped == 10 << 20);
	CHECK(accessible(before, 0) && accessible(before, 1) && accessible(after, 0) && accessible(after, 1));
	CHECK(double_in(device, UINT64_MAX) == 10 << 20);
	CHECK(accessible(before, 0) && accessible(before, 1) && accessible(after, 0) && accessible(after, 1));
	CHECK(cuMemFree_v2(before) == CUDA_SUCCESS && cuMemFree_v2(after) == CUDA_SUCCESS);
	CHECK(device->foreign == 0);
}

static bool copies;	/* atomically */

static void hold_copy(void *unused)
{
	(void)unused;
	while (!__atomic_load_n(&copies, __ATOMIC_ACQUIRE))
		usleep(1000);
}

static void *let_copy(void *unused)
{
	usleep(100000);
	__atomic_store_n(&copies, true, __ATOMIC_RELEASE);
	return unused;
}

/* Memory of its own that a program has made, and mapped, for the first GPU alone. */
static CUdeviceptr own_memory(size_t bytes)
{
	const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					   .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	const CUmemAccessDesc access = { .location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;
	CUdeviceptr address;

	CHECK(cuMemCreate(&handle, bytes, &prop, 0) == CUDA_SUCCESS);
	CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cuMemMap(address, bytes, 0, handle, 0) == CUDA_SUCCESS && cuMemRelease(handle) == CUDA_SUCCESS);
	CHECK(cuMemSetAccess(address, bytes, &access, 1) == CUDA_SUCCESS);
	return address;
}

/* Another GPU copies from memory to which it has no access: the memory moves once that is over. FAKE_DEVICES is 2. */
static void test_copier(void)
{
	const uint64_t work_us = 60000000;
	CUdeviceptr address;
	CUcontext other;
	CUstream stream;
	pthread_t thread;
	uint64_t usec;
	char *host;

	start();
	other = retain(1);
	host = malloc(6 << 20);
	CHECK(real.cuCtxSetCurrent(other) == CUDA_SUCCESS && device_current() != device);
	CHECK(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	for (int own = 0; own < 2; own++) {
		CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
		if (own)
			address = own_memory(6 << 20);
		else
			CHECK(cuMemAlloc_v2(&address, 6 << 20) == CUDA_SUCCESS);
		CHECK(real.cuCtxSetCurrent(other) == CUDA_SUCCESS);
		__atomic_store_n(&copies, false, __ATOMIC_RELEASE);
		CHECK(cuLaunchHostFunc(stream, hold_copy, NULL) == CUDA_SUCCESS);
		/* The stream says which GPU it is, and not the context. */
		CHECK(real.cuCtxSetCurrent(own ? other : context) == CUDA_SUCCESS);
		CHECK(cuMemcpyDtoHAsync_v2(host, address, 6 << 20, stream) == CUDA_SUCCESS);
		CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
		device->mover->work_us = 20000;
		CHECK(mover_out(device, UINT64_MAX, &usec) == 0);
		__atomic_store_n(&copies, true, __ATOMIC_RELEASE);
		CHECK(real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
		device->mover->work_us = work_us;
		while (calm_rests(device))
			usleep(1000);
		CHECK(double_out(device, UINT64_MAX) == 6 << 20);
		if (own)
			continue;
		/* What is freed, too. */
		CHECK(double_in(device, UINT64_MAX) == 6 << 20);
		__atomic_store_n(&copies, false, __ATOMIC_RELEASE);
		CHECK(cuLaunchHostFunc(stream, hold_copy, NULL) == CUDA_SUCCESS);
		CHECK(cuMemcpyDtoHAsync_v2(host, address, 6 << 20, stream) == CUDA_SUCCESS);
		CHECK(!pthread_create(&thread, NULL, let_copy, NULL));
		CHECK(cuMemFree_v2(address) == CUDA_SUCCESS && __atomic_load_n(&copies, __ATOMIC_ACQUIRE));
		CHECK(!pthread_join(thread, NULL));
	}
	free(host);
}

/* The background: with GGROUP_CUDA_POOL host chunks are made ahead. */
static void test_ahead(void)
{
	const double until = now() + 60;
	CUdeviceptr address;

	start();
	CHECK(cuMemAlloc_v2(&address, 40 << 20) == CUDA_SUCCESS);
	while (host_kept(device) < 22 << 20 && now() < until)
		usleep(1000);
	CHECK(host_kept(device) == 22 << 20);	/* of 32 asked for, in whole chunks of each size */
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	/* Memory that the GPU keeps and no program uses goes after a while. */
	CHECK(pool_kept(device) == 40 << 20);
	while (pool_kept(device) && now() < until)
		usleep(1000);
	CHECK(pool_kept(device) == 0);
	while (__atomic_load_n(&device->resident, __ATOMIC_RELAXED) && now() < until)
		usleep(1000);
	double_agree(device);
}

/* What another thread does within a call that frees, once the driver has: it is given what was freed. */
static struct {
	__typeof__(real.cuMemFree_v2) free;
	__typeof__(real.cuMemFreeAsync) free_async;
	CUresult refusal;	/* instead */
	CUdeviceptr given;
	bool async;
} within;

static CUresult allocate_there(CUdeviceptr *address)
{
	return within.async ? cuMemAllocAsync(address, 6 << 20, NULL) : cuMemAlloc_v2(address, 6 << 20);
}

static void *allocate_within(void *unused)
{
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(allocate_there(&within.given) == CUDA_SUCCESS);
	return unused;
}

static CUresult freed(CUresult result)
{
	pthread_t thread;

	CHECK(result == CUDA_SUCCESS);
	CHECK(!pthread_create(&thread, NULL, allocate_within, NULL) && !pthread_join(thread, NULL));
	return result;
}

static CUresult free_within(CUdeviceptr address)
{
	return within.refusal ? within.refusal : freed(within.free(address));
}

static CUresult free_async_within(CUdeviceptr address, CUstream stream)
{
	const CUresult result = within.refusal ? within.refusal : within.free_async(address, stream);

	if (result != CUDA_SUCCESS)
		return result;
	CHECK(real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
	return freed(result);
}

static CUresult free_there(CUdeviceptr address)
{
	return within.async ? cuMemFreeAsync(address, NULL) : cuMemFree_v2(address);
}

/* The driver gives an address out again at once: its new allocation is not taken for the one that was freed. What it
 * refuses to free stays in the books. */
static void test_reused(void)
{
	CUdeviceptr address;

	CHECK(!setenv("GGROUP_CUDA_IPC", "1", 1));
	start();
	within.free = real.cuMemFree_v2;
	within.free_async = real.cuMemFreeAsync;
	for (int async = 0; async < 2; async++) {
		within.async = async;
		CHECK(allocate_there(&address) == CUDA_SUCCESS && device->foreign == 6 << 20);
		real.cuMemFree_v2 = free_within;
		real.cuMemFreeAsync = free_async_within;
		within.refusal = CUDA_ERROR_UNKNOWN;
		CHECK(free_there(address) == CUDA_ERROR_UNKNOWN && device->foreign == 6 << 20);
		within.refusal = CUDA_SUCCESS;
		CHECK(free_there(address) == CUDA_SUCCESS);
		CHECK(within.given == address);
		double_agree(device);
		real.cuMemFree_v2 = within.free;
		real.cuMemFreeAsync = within.free_async;
		CHECK(free_there(within.given) == CUDA_SUCCESS && real.cuCtxSynchronize() == CUDA_SUCCESS);
		CHECK(device->foreign == 0 && device->resident == 0);
		double_agree(device);
	}
}

/* A figure that another thread may change. */
static uint64_t now_is(const uint64_t *figure)
{
	return __atomic_load_n(figure, __ATOMIC_RELAXED);
}

/* What is pinned of the host and serves nothing is what the daemon grants, at most; what serves is there all the
 * same. */
static void until_kept(uint64_t bytes)
{
	const double until = now() + 60;

	while (host_kept(device) != bytes && now() < until)
		usleep(1000);
	CHECK(host_kept(device) == bytes);
	CHECK(now_is(&device->host_held) == now_is(&device->host_used) + bytes);
	double_agree(device);
}

/* Bytes that went over the bus while all went and came. */
static uint64_t out_and_in(uint64_t bytes)
{
	const uint64_t before = bus("fake_memory_carried", TO_HOST);

	CHECK(double_out(device, UINT64_MAX) == bytes);
	CHECK(device->swapped == bytes && now_is(&device->clean) == 0);
	double_agree(device);
	CHECK(double_in(device, UINT64_MAX) == bytes);
	double_agree(device);
	return bus("fake_memory_carried", TO_HOST) - before;
}

/* What has not changed since it came is dropped, and not copied; its copy is no swap, and is what the host has back
 * first. */
static void test_clean(void)
{
	struct item items[6];
	uint64_t before;

	start();
	for (int i = 0; i < 6; i++) {
		items[i] = (struct item){ .bytes = 2 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	/* Where none is granted none is kept. */
	for (int round = 0; round < 2; round++)
		CHECK(out_and_in(12 << 20) == 12 << 20 && now_is(&device->clean) == 0);
	CHECK(marks_made() == 0);
	keeper_grant(device, 64 << 20);
	CHECK(out_and_in(12 << 20) == 12 << 20);
	CHECK(now_is(&device->clean) == 12 << 20 && now_is(&device->host_used) == 0 && device->swapped == 0);
	CHECK(out_and_in(12 << 20) == 0 && now_is(&device->clean) == 12 << 20);
	/* One word of one of them, a page of another: those go, and are clean again. */
	CHECK(cuMemcpyHtoD_v2(items[1].address + (1 << 20) + 8, &before, 8) == CUDA_SUCCESS);
	items[3].seed = 77;
	fill(&items[3]);
	CHECK(out_and_in(12 << 20) == 4 << 20);
	CHECK(out_and_in(12 << 20) == 0);
	fill(&items[1]);
	CHECK(out_and_in(12 << 20) == 2 << 20);
	/* What is written while it is in the host is no copy of what came before. */
	CHECK(double_out(device, UINT64_MAX) == 12 << 20);
	items[0].seed = 55;
	fill(&items[0]);
	CHECK(double_in(device, UINT64_MAX) == 12 << 20);
	CHECK(out_and_in(12 << 20) == 0);
	for (int i = 0; i < 6; i++)
		verify(&items[i]);
	/* Copies are the first that the host has back; without them all goes as ever. */
	keeper_grant(device, 4 << 20);
	for (const double until = now() + 60; now_is(&device->clean) > 4 << 20 && now() < until;)
		usleep(1000);
	CHECK(now_is(&device->clean) == 4 << 20 && now_is(&device->host_held) == 4 << 20);
	double_agree(device);
	before = bus("fake_memory_carried", TO_HOST);
	CHECK(double_out(device, UINT64_MAX) == 12 << 20);
	CHECK(bus("fake_memory_carried", TO_HOST) - before == 8 << 20);
	CHECK(double_in(device, UINT64_MAX) == 12 << 20);
	CHECK(now_is(&device->host_held) <= 4 << 20);
	for (int i = 0; i < 6; i++)
		verify(&items[i]);
	/* ... or another chunk, which needs its room. */
	keeper_grant(device, 6 << 20);
	CHECK(double_out(device, 6 << 20) == 6 << 20 && double_in(device, UINT64_MAX) == 6 << 20);
	CHECK(now_is(&device->clean) == 6 << 20);
	before = now_is(&device->host_held);
	for (int i = 0; i < 6; i++)
		use(items[i].address, on_gpu(items[i].address) ? 10 : 10);
	CHECK(double_out(device, 6 << 20) == 6 << 20 && now_is(&device->host_held) == before &&
	      now_is(&device->clean) == 0);
	double_in(device, UINT64_MAX);
	for (int i = 0; i < 6; i++)
		verify(&items[i]);
	/* Neighbours are marked together, and each for itself. */
	keeper_grant(device, 64 << 20);
	items[5].seed++;
	CHECK(cuMemFree_v2(items[5].address) == CUDA_SUCCESS);
	items[5].bytes = 22 << 20;	/* of 16 MiB, and three of 2 */
	CHECK(cuMemAlloc_v2(&items[5].address, items[5].bytes) == CUDA_SUCCESS);
	fill(&items[5]);
	out_and_in(32 << 20);
	for (size_t at = 14; at < 22; at += 2) {
		CHECK(cuMemcpyHtoD_v2(items[5].address + (at << 20) + 4096, &at, 8) == CUDA_SUCCESS);
		CHECK(out_and_in(32 << 20) == (at < 16 ? 16 << 20 : 2 << 20));
		CHECK(cuMemcpyDtoH_v2(&before, items[5].address + (at << 20) + 4096, 8) == CUDA_SUCCESS &&
		      before == at);
	}
	/* What is freed frees its copy. */
	for (int i = 0; i < 6; i++)
		CHECK(cuMemFree_v2(items[i].address) == CUDA_SUCCESS);
	CHECK(now_is(&device->clean) == 0);
	keeper_grant(device, 0);
	until_kept(0);
}

/* The end of a turn: nothing runs, however long that takes on a busy machine. */
static void drain(void)
{
	bool drained = false;

	while (!drained)
		CHECK(turn_end(device, 1000000, &drained) == 0);
}

/* ... and `bytes` of what goes next are marked. */
static void end_the_turn(uint64_t bytes)
{
	drain();
	CHECK(mover_mark(device, bytes) == bytes);
}

/* Calls about memory of the host that was, or is then, mapped for the program. */
struct of_host {
	uint64_t accesses, unmaps;
};

static struct of_host of_host(void)
{
	void (*ask)(uint64_t *, uint64_t *) = (void (*)(uint64_t *, uint64_t *))plain("fake_memory_of_host");
	struct of_host calls;

	ask(&calls.accesses, &calls.unmaps);
	return calls;
}

static bool none_of_host(void)
{
	const struct of_host calls = of_host();

	return !calls.accesses && !calls.unmaps;
}

/* So many chunks of an item are mapped nowhere. */
static unsigned int nowhere(const struct item *item)
{
	unsigned int count = 0;

	for (size_t at = 0; at < item->bytes; at += GG_CHUNK)
		count += place(item->address + at) == -1;
	return count;
}

#define BARE_ITEMS 8
#define BARE_ALL ((2 * (BARE_ITEMS - 1) + 70) << 20)

/* Memory whose copies in the host are there already, as after the first turns of a program. */
static void make_bare_items(struct item *items)
{
	start();
	for (int i = 0; i < BARE_ITEMS; i++) {
		items[i] = (struct item){ .bytes = i ? 2 << 20 : 70 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	CHECK(double_out(device, UINT64_MAX) == BARE_ALL && double_in(device, UINT64_MAX) == BARE_ALL);
	of_host();
}

static void verify_bare_items(const struct item *items)
{
	CHECK(!__atomic_load_n(&turn_bare, __ATOMIC_SEQ_CST));
	for (int i = 0; i < BARE_ITEMS; i++)
		if (items[i].address)
			verify(&items[i]);
	double_agree(device);
}

/* What goes between two turns, and comes back before the gate opens, is not mapped meanwhile; the rest is once it
 * opens. */
static void test_bare(void)
{
	struct item items[BARE_ITEMS];
	struct of_host calls;

	make_bare_items(items);
	for (int turn = 0; turn < 3; turn++) {
		drain();
		CHECK(double_out(device, UINT64_MAX) == BARE_ALL && none_of_host() && nowhere(&items[0]) == 35);
		CHECK(double_in(device, UINT64_MAX) == BARE_ALL && none_of_host() && nowhere(&items[0]) == 0);
		CHECK(double_out(device, UINT64_MAX) == BARE_ALL && double_in(device, 40 << 20) >= 40 << 20);
		CHECK(none_of_host());
		turn_begin(device, 0);
		calls = of_host();
		CHECK(calls.accesses && !calls.unmaps && nowhere(&items[0]) == 0);
		verify_bare_items(items);
		/* Outside of a gap it is mapped, as it was. */
		CHECK(double_in(device, UINT64_MAX) && of_host().unmaps);
		CHECK(double_out(device, 2 << 20) && of_host().accesses);
		CHECK(double_in(device, UINT64_MAX));
		verify_bare_items(items);
		of_host();
	}
	/* What was in the host before stays mapped there, and is unmapped as it comes. */
	CHECK(double_out(device, UINT64_MAX) == BARE_ALL);
	drain();
	of_host();
	CHECK(double_in(device, UINT64_MAX) == BARE_ALL && of_host().unmaps);
	CHECK(double_out(device, 10 << 20) >= 10 << 20);
	CHECK(double_exchange(device, 64 << 20) && turn_bare);
	turn_open_all();	/* as where the daemon is gone */
	CHECK(nowhere(&items[0]) == 0);
	verify_bare_items(items);
}

static void *write_one(void *argument)
{
	struct item *item = argument;

	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	item->seed += 100;
	fill(item);
	verify(item);
	return NULL;
}

/* Whatever asks about memory that is bare, frees it or hands it out finds it as it is. */
static void test_bare_asked(void)
{
	const CUmemLocation gpu = { .type = CU_MEM_LOCATION_TYPE_DEVICE };
	CUpointer_attribute kinds[] = { CU_POINTER_ATTRIBUTE_MAPPED, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID };
	unsigned long long flags = 0, block = 0;
	struct item items[BARE_ITEMS];
	bool is_mapped = false;
	void *data[] = { &is_mapped, &block };
	CUdeviceptr base, other;
	pthread_t thread;
	size_t bytes;

	make_bare_items(items);
	for (int kind = 0; kind < 6; kind++) {
		drain();
		CHECK(double_out(device, UINT64_MAX) && nowhere(&items[0]) == 35 && nowhere(&items[1]) == 1);
		CHECK(cuMemGetAddressRange_v2(&base, &bytes, items[0].address) == CUDA_SUCCESS);
		CHECK(bytes == items[0].bytes);
		switch (kind) {
		case 0:
			CHECK(cuMemGetAccess(&flags, &gpu, items[0].address) == CUDA_SUCCESS);
			CHECK(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
			break;
		case 1:
			CHECK(cuPointerGetAttributes(2, kinds, data, items[0].address) == CUDA_SUCCESS);
			CHECK(is_mapped && block);
			break;
		case 2:
			CHECK(cuPointerGetAttribute(&block, kinds[1], items[0].address) == CUDA_SUCCESS && block);
			break;
		case 3:	/* freed, and made anew */
			CHECK(cuMemFree_v2(items[2].address) == CUDA_SUCCESS);
			CHECK(cuMemAlloc_v2(&other, 2 << 20) == CUDA_SUCCESS && place(other) != -1);
			items[2].address = other;
			CHECK(double_in(device, 20 << 20));
			/* Some of it is mapped, some not. */
			CHECK(cuMemFree_v2(items[0].address) == CUDA_SUCCESS);
			CHECK(cuMemAlloc_v2(&items[0].address, items[0].bytes) == CUDA_SUCCESS);
			turn_begin(device, 0);
			fill(&items[2]);
			fill(&items[0]);
			break;
		case 4:	/* a thread waits for its turn meanwhile, with a copy */
			CHECK(!pthread_create(&thread, NULL, write_one, &items[1]));
			while (!turn_waiting(device))
				usleep(1000);
			CHECK(nowhere(&items[1]) == 1);
			turn_begin(device, 0);
			CHECK(!pthread_join(thread, NULL));
			break;
		default:	/* pinned: it comes back for that, and the rest is left */
			CHECK(pin_range(items[3].address, 1) == CUDA_SUCCESS);
			CHECK(place(items[3].address) == CU_MEM_LOCATION_TYPE_DEVICE);
		}
		CHECK(kind > 2 || nowhere(&items[0]) + nowhere(&items[1]) == 0);
		/* Once something was to be seen, nothing is bare until the next gap. */
		if (kind <= 2)
			CHECK(double_in(device, UINT64_MAX) && double_out(device, UINT64_MAX) && !turn_bare);
		turn_begin(device, 0);
		verify_bare_items(items);
		CHECK(double_in(device, UINT64_MAX));
	}
	verify_bare_items(items);
}

/* Another GPU of the process has its turn, or none at all, while memory of this one is bare. FAKE_DEVICES is 2. */
static void test_bare_elsewhere(void)
{
	struct item items[BARE_ITEMS];
	CUcontext other;
	char *host;

	make_bare_items(items);
	host = malloc(2 << 20);
	other = retain(1);
	for (int kind = 0; kind < 2; kind++) {
		const struct item *used = &items[1 + kind];

		CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
		drain();
		CHECK(double_out(device, UINT64_MAX) && nowhere(used) == 1);
		CHECK(real.cuCtxSetCurrent(other) == CUDA_SUCCESS && device_current() != device);
		if (kind)
			CHECK(cuCtxEnablePeerAccess(context, 0) == CUDA_SUCCESS);
		CHECK(cuMemcpyDtoH_v2(host, used->address, 2 << 20) == CUDA_SUCCESS);
		CHECK(nowhere(&items[0]) == 0 && *(uint64_t *)host == used->seed);
		CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
		turn_begin(device, 0);
		verify_bare_items(items);
		CHECK(double_in(device, UINT64_MAX));
		/* From now on it is not bare: another GPU uses it. */
		drain();
		CHECK(double_out(device, UINT64_MAX) && nowhere(used) == 0 && nowhere(&items[0]) == (kind ? 0 : 35));
		turn_begin(device, 0);
		CHECK(double_in(device, UINT64_MAX));
	}
	drain();
	CHECK(double_out(device, UINT64_MAX) && nowhere(&items[0]) + nowhere(&items[1]) == 0);
	turn_begin(device, 0);
	verify_bare_items(items);
	free(host);
}

static bool maps_fail;	/* atomically */

static CUresult fail_maps(const char *name)
{
	return !strcmp(name, "cuMemMap") && __atomic_load_n(&maps_fail, __ATOMIC_SEQ_CST) ? CUDA_ERROR_OUT_OF_MEMORY :
											    CUDA_SUCCESS;
}

static void *let_maps(void *unused)
{
	usleep(50000);
	__atomic_store_n(&maps_fail, false, __ATOMIC_SEQ_CST);
	return unused;
}

/* What cannot be mapped as the gate opens is before the next work goes to the GPU, however long that takes. */
static void test_bare_faults(void)
{
	struct item items[BARE_ITEMS];
	pthread_t thread;

	make_bare_items(items);
	((void (*)(CUresult (*)(const char *)))plain("fake_on_call"))(fail_maps);
	for (int turn = 0; turn < 3; turn++) {
		drain();
		CHECK(double_out(device, UINT64_MAX) && turn_bare);
		__atomic_store_n(&maps_fail, true, __ATOMIC_SEQ_CST);
		turn_begin(device, 0);
		CHECK(turn_bare && nowhere(&items[0]) == 35);
		/* Nothing of it has to be mapped to be freed. */
		CHECK(turn != 1 || cuMemFree_v2(items[3].address) == CUDA_SUCCESS);
		items[3].address = turn ? 0 : items[3].address;
		/* It is in the gap no more, and goes as it went before. */
		CHECK(turn != 2 || (double_out(device, UINT64_MAX) == 0 && turn_bare));
		CHECK(!pthread_create(&thread, NULL, let_maps, NULL));
		verify(&items[0]);
		CHECK(!pthread_join(thread, NULL));
		verify_bare_items(items);
		CHECK(double_in(device, UINT64_MAX));
	}
	verify_bare_items(items);
}

/* A copy of bare memory does not end, and the gate opens: what it reads is covered, and comes later. */
static void test_bare_stuck(void)
{
	struct item items[BARE_ITEMS];
	void (*let)(int, uint64_t);

	make_bare_items(items);
	let = (void (*)(int, uint64_t))plain("fake_memory_let");
	drain();
	CHECK(double_out(device, UINT64_MAX) == BARE_ALL);
	device->mover->copy_us = 100000;
	let(TO_GPU, 1);
	CHECK(double_in(device, UINT64_MAX) < BARE_ALL && turn_bare);
	turn_begin(device, 0);
	CHECK(!turn_bare && nowhere(&items[0]) == 0);
	let(TO_GPU, UINT64_MAX);
	device->mover->copy_us = 60000000;
	for (int i = 0; i < BARE_ITEMS; i++)
		verify(&items[i]);
	while (!mover_rests(device))
		usleep(1000);
	double_in(device, UINT64_MAX);
	verify_bare_items(items);
}

/* Marks are made for no longer than a turn may take to end: what has none is copied. */
static void test_marks_end(void)
{
	enum { ALL = 12 << 20 };
	CUdeviceptr address;

	start();
	keeper_grant(device, 64 << 20);
	CHECK(cuMemAlloc_v2(&address, ALL) == CUDA_SUCCESS);
	drain();
	device->mover->mark_us = 0;
	CHECK(mover_mark(device, ALL) == 0 && marks_made() == 0 && mover_rests(device));
	device->mover->mark_us = 60000000;
	CHECK(mover_mark(device, ALL) == ALL && marks_made() && mover_rests(device));
	turn_begin(device, 0);
	double_agree(device);
}

/* Between two turns no kernel of ours runs: what the marks of the end of the last one say holds until the next. */
static void test_clean_turns(void)
{
	enum { ALL = 12 << 20 };
	struct item items[6];
	uint64_t looked;

	start();
	keeper_grant(device, 64 << 20);
	for (int i = 0; i < 6; i++) {
		items[i] = (struct item){ .bytes = 2 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	CHECK(mover_mark(device, ALL) == 0);	/* its turn is not over */
	for (int turn = 0; turn < 4; turn++) {
		looked = marks_made();
		end_the_turn(ALL);
		CHECK(marks_made() == looked + 6 && mover_mark(device, ALL) == ALL && marks_made() == looked + 6);
		/* What is as it came is known to be before it goes. */
		CHECK(clean_unwritten(device) == (turn == 0 ? 0 : turn == 2 ? ALL - (2 << 20) : ALL));
		CHECK(out_and_in(ALL) == (turn == 0 ? ALL : turn == 2 ? 2 << 20 : 0));
		CHECK(out_and_in(ALL) == 0);
		CHECK(marks_made() == looked + 6 && now_is(&device->clean) == ALL && clean_unwritten(device) == ALL);
		CHECK(double_out(device, 4 << 20) == 4 << 20 && clean_unwritten(device) == ALL - (4 << 20));
		CHECK(double_in(device, UINT64_MAX) == 4 << 20 && clean_unwritten(device) == ALL);
		turn_begin(device, 0);
		CHECK(clean_unwritten(device) == 0);	/* it may be written */
		items[1].seed += turn == 1;
		if (turn == 1)
			fill(&items[1]);
		for (int i = 0; i < 6; i++)
			verify(&items[i]);
	}
	/* As much as is about to go, and that. */
	looked = marks_made();
	end_the_turn(4 << 20);
	CHECK(marks_made() == looked + 2);
	looked = bus("fake_memory_carried", TO_HOST);
	CHECK(double_out(device, 4 << 20) == 4 << 20 && bus("fake_memory_carried", TO_HOST) == looked);
	CHECK(double_out(device, UINT64_MAX) == 8 << 20 && bus("fake_memory_carried", TO_HOST) == looked + (8 << 20));
	/* What was written in the host, in the turn, has no mark in the next gap, nor has what came before. */
	turn_begin(device, 0);
	for (int i = 0; i < 6; i++) {
		items[i].seed += 100;
		fill(&items[i]);
	}
	looked = marks_made();
	drain();
	CHECK(double_in(device, UINT64_MAX) == ALL && now_is(&device->clean) == 0 && marks_made() == looked);
	CHECK(out_and_in(ALL) == ALL);
	turn_begin(device, 0);
	for (int i = 0; i < 6; i++)
		verify(&items[i]);
	double_agree(device);
}

/* Marks that do not end keep nothing but what they are of from moving, and that until they do. */
static void test_clean_stuck(void)
{
	struct item items[2];

	start();
	keeper_grant(device, 64 << 20);
	for (int i = 0; i < 2; i++) {
		items[i] = (struct item){ .bytes = 2 << 20, .seed = (uint64_t)i };
		CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	CHECK(out_and_in(4 << 20) == 4 << 20);
	for (int round = 0; round < 3; round++) {	/* as they go, as they come, at the end of a turn */
		if (round == 1)
			CHECK(double_out(device, UINT64_MAX) == 4 << 20);
		if (round == 2)
			drain();
		marks_hold(true);
		device->mover->copy_us = 500000;	/* longer than a copy, on a busy machine too */
		CHECK((round == 0 ? double_out(device, UINT64_MAX) : round == 1 ? double_in(device, UINT64_MAX) :
				    mover_mark(device, 4 << 20)) == 0);
		for (int i = 0; i < 2 && round < 2; i++)	/* a copy of the program's waits for its turn */
			verify(&items[i]);
		CHECK(double_out(device, UINT64_MAX) == 0 && double_in(device, UINT64_MAX) == 0);
		device->mover->copy_us = 60000000;
		marks_hold(false);
		do
			double_in(device, UINT64_MAX);
		while (device->mover->stuck[TO_HOST] || device->mover->stuck[TO_GPU]);
		double_agree(device);
		if (round == 2)
			turn_begin(device, 0);
		out_and_in(4 << 20);
		CHECK(out_and_in(4 << 20) == 0);
		for (int i = 0; i < 2; i++)
			verify(&items[i]);
	}
}

/* Whichever call fails: nothing is taken for clean that is not, and all can move again. */
static void test_clean_faults(void)
{
	struct item items[3];

	start();
	keeper_grant(device, 64 << 20);
	for (int i = 0; i < 3; i++) {
		items[i] = (struct item){ .bytes = (size_t)(2 + 16 * (i == 2)) << 20, .seed = (uint64_t)i };
		if (cuMemAlloc_v2(&items[i].address, items[i].bytes) != CUDA_SUCCESS)
			CHECK(cuMemAlloc_v2(&items[i].address, items[i].bytes) == CUDA_SUCCESS);
		fill(&items[i]);
	}
	for (int round = 0; round < 5; round++) {
		bool drained = false;

		if (round % 2 == 0 && turn_end(device, 1000000, &drained) == 0 && drained)
			mover_mark(device, UINT64_MAX);
		double_out(device, UINT64_MAX);
		double_agree(device);
		if (round == 3) {
			items[1].seed = 44;
			fill(&items[1]);
		}
		double_in(device, UINT64_MAX);
		double_agree(device);
		turn_begin(device, 0);
		for (int i = 0; i < 3; i++) {
			verify(&items[i]);
			items[i].seed += (uint64_t)(round == 1 && i != 1);
			fill(&items[i]);
		}
	}
	double_out(device, 4 << 20);
	double_exchange(device, 4 << 20);
	double_agree(device);
	for (int i = 0; i < 3; i++) {
		verify(&items[i]);
		if (cuMemFree_v2(items[i].address) != CUDA_SUCCESS)
			CHECK(cuMemFree_v2(items[i].address) == CUDA_SUCCESS);
	}
	CHECK(now_is(&device->clean) == 0);
	double_agree(device);
}

/* What changes each time is not looked at each time. */
static void test_clean_changes(void)
{
	struct item item = { .bytes = 2 << 20 };
	uint64_t looked;

	start();
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	keeper_grant(device, 64 << 20);
	for (int round = 0; round < 40; round++) {
		item.seed = (uint64_t)round;
		fill(&item);
		out_and_in(2 << 20);
		verify(&item);
	}
	looked = marks_made();
	CHECK(looked > 4 && looked <= 12);
	/* Once it does not any more that is found out. */
	for (int round = 0; round < 40; round++)
		out_and_in(2 << 20);
	CHECK(out_and_in(2 << 20) == 0);
	verify(&item);
}

static void test_granted(void)
{
	struct item item = { .bytes = 40 << 20, .seed = 5 };

	start();
	keeper_grant(device, 0);
	CHECK(cuMemAlloc_v2(&item.address, item.bytes) == CUDA_SUCCESS);
	fill(&item);
	CHECK(now_is(&device->host_wanted) == 40 << 20);
	usleep(50000);
	CHECK(host_kept(device) == 0);
	keeper_grant(device, 48 << 20);
	until_kept(40 << 20);	/* as much as it wants */
	keeper_grant(device, 20 << 20);
	until_kept(16 << 20 | 4 << 20);
	keeper_grant(device, 6 << 20);
	until_kept(4 << 20);
	CHECK(double_out(device, UINT64_MAX) == 40 << 20);
	CHECK(now_is(&device->host_used) == 40 << 20 && now_is(&device->host_held) == 40 << 20);
	verify(&item);
	CHECK(double_in(device, UINT64_MAX) == 40 << 20);
	CHECK(now_is(&device->host_used) == 0 && host_kept(device) <= 6 << 20);
	keeper_grant(device, 48 << 20);
	until_kept(40 << 20);
	/* A daemon that does not know of it: what is there stays. */
	keeper_grant(device, UINT64_MAX);
	until_kept(40 << 20);
	verify(&item);
	CHECK(cuMemFree_v2(item.address) == CUDA_SUCCESS);
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} tests[] = {
		{ "basic", test_basic }, { "limit", test_limit }, { "no_swap", test_no_swap },
		{ "exhaustion", test_exhaustion }, { "faults", test_faults }, { "stress", test_stress },
		{ "persistent", test_persistent }, { "queue", test_queue }, { "inside", test_inside },
		{ "long", test_long }, { "ahead_of_it", test_ahead_of_it }, { "destroyed", test_destroyed },
		{ "async", test_async }, { "contexts", test_contexts },
		{ "pin", test_pin }, { "heat", test_heat }, { "heat_in_one", test_heat_in_one },
		{ "exchange", test_exchange },
		{ "heat_copied", test_heat_copied }, { "reached", test_reached },
		{ "exchange_by_itself", test_exchange_by_itself }, { "exchange_more", test_exchange_more },
		{ "exchange_whole", test_exchange_whole },
		{ "order", test_order }, { "order_in_one", test_order_in_one },
		{ "order_of_short_turns", test_order_of_short_turns },
		{ "both_ways", test_both_ways }, { "both_ways_stuck", test_both_ways_stuck },
		{ "freed_as_it_goes", test_freed_as_it_goes },
		{ "foreign", test_foreign }, { "reused", test_reused },
		{ "attributes", test_attributes }, { "capture", test_capture }, { "peers", test_peers },
		{ "copier", test_copier },
		{ "ahead", test_ahead }, { "granted", test_granted },
		{ "clean", test_clean }, { "clean_changes", test_clean_changes },
		{ "clean_faults", test_clean_faults }, { "clean_turns", test_clean_turns },
		{ "marks_end", test_marks_end },
		{ "clean_stuck", test_clean_stuck }, { "stuck", test_stuck },
		{ "bare", test_bare }, { "bare_asked", test_bare_asked }, { "bare_elsewhere", test_bare_elsewhere },
		{ "bare_stuck", test_bare_stuck }, { "bare_faults", test_bare_faults },
		{ "stuck_goes", test_stuck_goes }, { "stuck_stays", test_stuck_stays },
	};

	for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]) && count == 2; i++)
		if (!strcmp(tests[i].name, arguments[1])) {
			tests[i].run();
			return 0;
		}
	return 2;
}
