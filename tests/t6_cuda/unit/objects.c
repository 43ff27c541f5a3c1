// SPDX-License-Identifier: Apache-2.0
/* Tests of object.c, view.c, place.c, names.c, join.c, outside.c: `objects NAME` runs one against the double of the
 * driver. */

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "carry.h"
#include "device.h"
#include "double.h"
#include "foreign.h"
#include "fuzz.h"
#include "gate.h"
#include "library.h"
#include "object.h"
#include "opened.h"
#include "order.h"
#include "ours.h"
#include "pages.h"
#include "pick.h"
#include "place.h"
#include "tree.h"
#include "turn.h"

#define MIB (UINT64_C(1) << 20)
#define PAGE GG_CHUNK

static struct device *device;
static CUcontext context;
static int (*place)(CUdeviceptr);

static void *plain(const char *name)
{
	void *found = driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);

	CHECK(found);
	return found;
}

static void enter_context(void)
{
	__typeof__(&cuDevicePrimaryCtxRetain) retain = (__typeof__(retain))plain("cuDevicePrimaryCtxRetain");

	CHECK(retain(&context, 0) == CUDA_SUCCESS && real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	device = device_current();
	CHECK(device && device->elastic);
	device->mover->copy_us = device->mover->work_us = 60000000;	/* a driver of threads, on a busy machine */
}

static void begin(void)
{
	library_begin();
	CHECK(real.cuInit(0) == CUDA_SUCCESS);
	place = (int (*)(CUdeviceptr))plain("fake_memory_place");
}

static void start(void)
{
	begin();
	enter_context();
}

static uint64_t random_state = 88172645463325252;
static uint64_t any(uint64_t below)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % below;
}

static CUmemAllocationProp movable(void)
{
	return (CUmemAllocationProp){ .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				      .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
}

static const CUmemAccessDesc writable = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE },
					  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

static CUmemGenericAllocationHandle create(size_t bytes)
{
	const CUmemAllocationProp prop = movable();
	CUmemGenericAllocationHandle handle;

	CHECK(cuMemCreate(&handle, bytes, &prop, 0) == CUDA_SUCCESS);
	return handle;
}

static CUdeviceptr reserve(size_t bytes)
{
	CUdeviceptr address;

	CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0) == CUDA_SUCCESS);
	return address;
}

static void map(CUdeviceptr address, size_t bytes, CUmemGenericAllocationHandle handle)
{
	CHECK(cuMemMap(address, bytes, 0, handle, 0) == CUDA_SUCCESS);
	CHECK(cuMemSetAccess(address, bytes, &writable, 1) == CUDA_SUCCESS);
}

/* Writes a word at the beginning and the end of a page. */
static void write_page(CUdeviceptr page, uint64_t word)
{
	CHECK(cuMemcpyHtoD_v2(page, &word, 8) == CUDA_SUCCESS &&
	      cuMemcpyHtoD_v2(page + PAGE - 8, &word, 8) == CUDA_SUCCESS);
}

static bool has(CUdeviceptr page, uint64_t word)
{
	uint64_t first = ~word, last = ~word;

	CHECK(cuMemcpyDtoH_v2(&first, page, 8) == CUDA_SUCCESS &&
	      cuMemcpyDtoH_v2(&last, page + PAGE - 8, 8) == CUDA_SUCCESS);
	return first == word && last == word;
}

static void write_all(CUdeviceptr address, size_t bytes, uint64_t word)
{
	for (size_t at = 0; at < bytes; at += PAGE)
		write_page(address + at, word + at);
}

static bool have(CUdeviceptr address, size_t bytes, uint64_t word)
{
	bool right = true;

	for (size_t at = 0; at < bytes; at += PAGE)
		right = right && has(address + at, word + at);
	return right;
}

/* The time for which one call holds the driver's lock is bounded, however large the memory that moves. */
static void test_runs(void)
{
	const size_t bytes = 200 * MIB;
	CUmemGenericAllocationHandle handle;
	CUdeviceptr allocated, address;
	struct region *region;
	uint64_t (*widest)(void);

	start();
	widest = (uint64_t (*)(void))plain("fake_memory_widest");
	handle = create(bytes);
	address = reserve(bytes);
	map(address, bytes, handle);
	write_all(address, bytes, 7);
	CHECK(cuMemAlloc_v2(&allocated, bytes) == CUDA_SUCCESS);
	write_all(allocated, bytes, 8);
	region = pages_region(allocated);
	widest();
	for (int round = 0; round < 2; round++) {
		CHECK(double_out(device, UINT64_MAX) >= 2 * bytes);
		CHECK(double_in(device, UINT64_MAX) >= 2 * bytes);
		CHECK(widest() == PLACE_RUN_BYTES);
	}
	/* As a departure does. */
	CHECK(region && place_leave(&(struct place_run){ region, 0, region->chunks }));
	CHECK(place_enter(&(struct place_run){ region, 0, region->chunks }, NULL) == CUDA_SUCCESS);
	CHECK(widest() == PLACE_RUN_BYTES);
	CHECK(have(address, bytes, 7) && have(allocated, bytes, 8));
	double_agree(device);
}

static void use(CUdeviceptr address, size_t bytes, int times)
{
	for (int i = 0; i < times; i++)
		pages_use(address, bytes);
}

/* An object that goes as a whole has left the GPU before another comes in its place: the GPU has room for one of them
 * (FAKE_MEMORY). Mapped or not. */
static void test_instead(void)
{
	enum { BYTES = 8 << 20 };
	CUmemGenericAllocationHandle handle[2];
	CUdeviceptr address[2];

	start();
	for (int i = 0; i < 2; i++) {
		handle[i] = create(BYTES);
		address[i] = reserve(BYTES);
		map(address[i], BYTES, handle[i]);
		write_all(address[i], BYTES, (uint64_t)i);
		if (!i)
			CHECK(double_out(device, UINT64_MAX) == BYTES);
	}
	for (int round = 0; round < 3; round++) {
		const int cold = (round + 1) % 2;

		CHECK(place(address[cold]) == CU_MEM_LOCATION_TYPE_DEVICE);
		for (int i = 0; i < 8; i++)
			CHECK(pick_look(device, true));
		use(address[!cold], BYTES, 1000);
		CHECK(pick_look(device, true));
		if (round == 2)
			CHECK(cuMemUnmap(address[cold], BYTES) == CUDA_SUCCESS);
		CHECK(double_exchange(device, BYTES) == BYTES);
		CHECK(place(address[!cold]) == CU_MEM_LOCATION_TYPE_DEVICE);
		if (round == 2)
			map(address[cold], BYTES, handle[cold]);
		CHECK(place(address[cold]) == CU_MEM_LOCATION_TYPE_HOST_NUMA);
		for (int i = 0; i < 2; i++)
			CHECK(have(address[i], BYTES, (uint64_t)i));
		double_agree(device);
	}
	CHECK(device->resident == BYTES && device->swapped == BYTES);
}

/* As PyTorch's expandable segments and a sleeping server do, always under a limit. */
static void test_segments(void)
{
	enum { SEGMENTS = 8, BYTES = 20 << 20 };
	const size_t limit = 64 << 20;
	CUmemGenericAllocationHandle handle[SEGMENTS];
	CUdeviceptr address;

	start();
	double_limit(limit);
	address = reserve((size_t)SEGMENTS * BYTES);
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < SEGMENTS; i++) {
			handle[i] = create(BYTES);
			map(address + (CUdeviceptr)i * BYTES, BYTES, handle[i]);
			write_all(address + (CUdeviceptr)i * BYTES, BYTES, (uint64_t)(i + round) << 40);
			CHECK(device->resident <= limit);
			double_agree(device);
		}
		CHECK(device->resident + device->swapped == (uint64_t)SEGMENTS * BYTES && device->foreign == 0);
		for (int i = 0; i < SEGMENTS; i++)
			CHECK(have(address + (CUdeviceptr)i * BYTES, BYTES, (uint64_t)(i + round) << 40));
		double_limit(UINT64_MAX);
		CHECK(device->swapped == 0);
		double_agree(device);
		double_limit(limit);
		/* All at once, as for sleep; or in the middle, as for unused segments. */
		if (round != 1)
			CHECK(cuMemUnmap(address, (size_t)SEGMENTS * BYTES) == CUDA_SUCCESS);
		for (int i = 0; i < SEGMENTS; i++) {
			if (round == 1)
				CHECK(cuMemUnmap(address + (CUdeviceptr)i * BYTES, BYTES) == CUDA_SUCCESS);
			CHECK(cuMemRelease(handle[i]) == CUDA_SUCCESS);
			double_agree(device);
		}
		CHECK(device->resident == pool_kept(device) && device->swapped == 0);
	}
	CHECK(cuMemAddressFree(address, (size_t)SEGMENTS * BYTES) == CUDA_SUCCESS);
}

/* A tensor in several segments is hot as a whole by the pointer to its first page; memory mapped there before it is
 * not. */
static void test_segments_are_hot(void)
{
	enum { SEGMENTS = 4, BYTES = 20 << 20 };
	CUmemGenericAllocationHandle handle[SEGMENTS], other;
	CUdeviceptr address, elsewhere;
	uint64_t out;

	start();
	address = reserve((size_t)SEGMENTS * BYTES);
	elsewhere = reserve(BYTES);
	for (int i = 0; i < SEGMENTS; i++) {
		handle[i] = create(BYTES);
		map(address + (CUdeviceptr)i * BYTES, BYTES, handle[i]);
	}
	other = create(BYTES);
	map(elsewhere, BYTES, other);
	for (int round = 0; round < 2; round++) {
		for (int use = 0; use < 20; use++) {
			pages_use_from(address + 100);
			pages_use_from(elsewhere);
		}
		CHECK(pick_look(device, false));
		CHECK(pick_misplaced(device, UINT64_MAX) == 0);
		out = double_out(device, BYTES);
		CHECK(out >= BYTES && pick_misplaced(device, UINT64_MAX) == 0);	/* all are equally hot */
		CHECK(double_in(device, UINT64_MAX) == out);
		/* The last two are mapped anew, behind an object that begins there now. */
		CHECK(cuMemUnmap(address + 2 * BYTES, 2 * BYTES) == CUDA_SUCCESS);
		for (int i = 2; i < SEGMENTS; i++) {
			pages_use_from(address + (CUdeviceptr)i * BYTES + PAGE);
			map(address + (CUdeviceptr)i * BYTES, BYTES, handle[i]);
		}
	}
	/* Memory mapped right behind it with a beginning of its own does not get its heat. */
	for (int use = 0; use < 20; use++)
		pages_use_from(address);
	pages_use_from(address + 2 * BYTES);
	for (int round = 0; round < 3; round++)
		CHECK(pick_look(device, true));
	CHECK(double_out(device, BYTES) == BYTES);
	CHECK(place(address) == CU_MEM_LOCATION_TYPE_DEVICE && place(address + BYTES) == CU_MEM_LOCATION_TYPE_DEVICE);
	double_agree(device);
}

static void end_turn(void)
{
	bool drained;

	ours_enter();
	CHECK(!turn_end(device, 60000000, &drained) && drained);
	ours_leave();
}

static void used_are(uint64_t used, uint64_t resident)
{
	uint64_t now_used, now_resident;

	order_sums(device, &now_used, &now_resident);
	CHECK(now_used == used << 20 && now_resident == resident << 20);
}

/* An object that has never moved is one unit: it is used first when any part of it is, at any address, and goes as a
 * whole. Once it has moved, each of its chunks counts by itself. */
static void test_segments_in_order(void)
{
	enum { SEGMENTS = 4, BYTES = 20 << 20, SECOND = 1000000 };
	CUmemGenericAllocationHandle handle[SEGMENTS];
	CUdeviceptr address[SEGMENTS], again;

	start();
	for (int i = 0; i < SEGMENTS; i++) {
		handle[i] = create(BYTES);
		address[i] = reserve(BYTES);
		map(address[i], BYTES, handle[i]);
		write_all(address[i], BYTES, (uint64_t)i << 40);
	}
	again = reserve(BYTES);
	map(again, BYTES, handle[1]);
	order_begin(device);	/* the earlier uses do not count */
	pages_use(address[2] + 16 * PAGE / 2, PAGE);
	pages_use(again + 9 * PAGE, PAGE);
	pages_use(address[3], PAGE);
	order_learn(device, SECOND);
	used_are(60, 60);
	end_turn();
	CHECK(double_out(device, BYTES) == BYTES);	/* the unused one */
	CHECK(place(address[0]) != CU_MEM_LOCATION_TYPE_DEVICE);
	used_are(60, 60);
	CHECK(double_out(device, 1) == BYTES);		/* all of the last one in order */
	CHECK(place(address[3]) != CU_MEM_LOCATION_TYPE_DEVICE && place(address[1]) == CU_MEM_LOCATION_TYPE_DEVICE);
	CHECK(double_out(device, BYTES) == BYTES);
	CHECK(place(address[1]) != CU_MEM_LOCATION_TYPE_DEVICE && place(address[2]) == CU_MEM_LOCATION_TYPE_DEVICE);
	used_are(60, 20);
	CHECK(double_out(device, UINT64_MAX) == BYTES);
	double_agree(device);
	CHECK(double_prepare(device, UINT64_MAX) == 3 * BYTES && place(address[0]) != CU_MEM_LOCATION_TYPE_DEVICE);
	used_are(60, 60);
	turn_begin(device, 0);
	/* Now two chunks of one are used. */
	pages_use(address[3], PAGE);
	pages_use(address[3] + BYTES - PAGE, PAGE);
	order_learn(device, SECOND);
	CHECK(double_out(device, UINT64_MAX) == 3 * BYTES);
	CHECK(double_prepare(device, UINT64_MAX) < BYTES && place(address[3]) == CU_MEM_LOCATION_TYPE_DEVICE &&
	      place(address[3] + BYTES - PAGE) == CU_MEM_LOCATION_TYPE_DEVICE);
	for (int i = 0; i < SEGMENTS; i++) {
		CHECK(have(address[i], BYTES, (uint64_t)i << 40));
		CHECK(cuMemUnmap(address[i], BYTES) == CUDA_SUCCESS && cuMemRelease(handle[i]) == CUDA_SUCCESS);
	}
	CHECK(cuMemUnmap(again, BYTES) == CUDA_SUCCESS);
	order_learn(device, SECOND);
	used_are(0, 0);
	double_agree(device);
}

/* More chunks than go at a time: as many of the last in order as fit, and whole objects as wholes, unless they are
 * larger than may go so. */
static void test_many_in_order(void)
{
	enum { COUNT = 40, BYTES = 14 << 20, MOST = 100 };
	CUdeviceptr address[COUNT];
	struct pick picks[MOST];
	size_t count;

	start();
	for (int i = 0; i < COUNT; i++) {
		address[i] = reserve(BYTES);
		map(address[i], BYTES, create(BYTES));
		pages_use(address[i], PAGE);
	}
	order_learn(device, 1000000);
	pthread_mutex_lock(&tree_lock);
	CHECK(order_last(device->regions, SIZE_MAX, BYTES - 1, picks, MOST) == 0);
	count = order_last(device->regions, SIZE_MAX, BYTES, picks, MOST);
	pthread_mutex_unlock(&tree_lock);
	CHECK(count == MOST / 7 * 7);
	for (size_t i = 0; i < count; i++) {
		CHECK(picks[i].index == i % 7 && picks[i].region == picks[i / 7 * 7].region);
		CHECK(picks[i].region->chunk[picks[i].index].order > COUNT - MOST / 7);
	}
	pick_put(picks, count);
	double_agree(device);
}

/* Memory made before the first context is charged, and can move once there is a context. */
static void test_early(void)
{
	CUmemAllocationProp prop = movable();
	CUmemGenericAllocationHandle handle, none;
	CUdeviceptr address;

	begin();
	prop.location.id = 7;
	CHECK(device_for_memory(7) == NULL && device_for_memory(-1) == NULL);
	prop.location.id = 0;
	CHECK(cuMemCreate(&handle, 12 << 20, &prop, 0) == CUDA_SUCCESS);
	device = device_of(0);
	CHECK(device && device->resident == 12 << 20);
	double_agree(device);
	double_limit(4 << 20);	/* there is no context in which to move anything */
	CHECK(device->resident == 12 << 20);
	address = reserve(12 << 20);
	enter_context();
	map(address, 12 << 20, handle);
	write_all(address, 12 << 20, 5);
	double_swap(false);
	CHECK(cuMemCreate(&none, 2 << 20, &prop, 0) == CUDA_ERROR_OUT_OF_MEMORY);
	double_swap(true);
	double_limit(4 << 20);
	CHECK(device->resident <= 4 << 20 && have(address, 12 << 20, 5));
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS && cuMemUnmap(address, 12 << 20) == CUDA_SUCCESS);
	CHECK(device->resident == pool_kept(device) && device->swapped == 0);
	double_agree(device);
}

/* All views of an object show the same, wherever it is, each with its access; FAKE_OFFSETS is 1. */
static void test_views(void)
{
	const CUmemAccessDesc readable = { .location = writable.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READ };
	const CUmemAccessDesc both[] = { writable, { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 },
						     .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE } };
	const size_t bytes = 20 << 20, half = 8 << 20;
	const CUmemLocation first = writable.location;
	bool (*accessible)(CUdeviceptr, CUdevice);
	CUmemGenericAllocationHandle handle, again;
	CUdeviceptr one, two, three, base;
	unsigned long long flags;
	unsigned int type;
	size_t size;

	start();
	accessible = (bool (*)(CUdeviceptr, CUdevice))plain("fake_memory_accessible");
	handle = create(bytes);
	one = reserve(bytes);
	two = reserve(bytes);
	three = reserve(half);
	map(one, bytes, handle);
	CHECK(cuMemMap(two, bytes, 0, handle, 0) == CUDA_SUCCESS);
	CHECK(cuMemSetAccess(two, bytes, &readable, 1) == CUDA_SUCCESS);
	CHECK(cuMemMap(three, half, half, handle, 0) == CUDA_SUCCESS);	/* without any access */
	CHECK(cuMemUnmap(one, half) == CUDA_ERROR_INVALID_VALUE);
	write_all(one, bytes, 9);
	for (int round = 0; round < 3; round++) {
		CHECK(double_out(device, round == 1 ? 4 << 20 : UINT64_MAX) == (round == 1 ? 16 << 20 : bytes) ||
		      round);
		double_agree(device);
		CHECK(place(one) == place(two) && place(one + half) == place(three));
		CHECK(have(one, bytes, 9 + (uint64_t)round) && have(two, bytes, 9 + (uint64_t)round));
		CHECK(cuMemGetAccess(&flags, &first, two + half) == CUDA_SUCCESS &&
		      flags == CU_MEM_ACCESS_FLAGS_PROT_READ);
		CHECK(cuMemGetAccess(&flags, &first, three) == CUDA_SUCCESS && flags == CU_MEM_ACCESS_FLAGS_PROT_NONE);
		CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, one + half) == CUDA_SUCCESS);
		CHECK(type == CU_MEMORYTYPE_DEVICE);
		CHECK(cuMemGetAddressRange_v2(&base, &size, two + 5) == CUDA_SUCCESS && base == two && size == bytes);
		CHECK(cuMemUnmap(one, half) == CUDA_ERROR_INVALID_VALUE);
		write_all(one, bytes, 10 + (uint64_t)round);
		CHECK(double_in(device, UINT64_MAX) || !device->swapped);
		double_agree(device);
		CHECK(have(one, bytes, 10 + (uint64_t)round) && have(two, bytes, 10 + (uint64_t)round));
	}
	/* Access for another GPU is kept across a move, even with the handle released; the handle can be had again. */
	CHECK(cuMemSetAccess(three, half, both, 2) == CUDA_SUCCESS);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	CHECK(cuMemRelease(handle) == CUDA_ERROR_INVALID_VALUE);
	CHECK(double_out(device, UINT64_MAX) == bytes);
	CHECK(accessible(three, 1) && accessible(three, 0) && !accessible(one, 1) && have(three, half, 12 + half));
	CHECK(cuMemUnmap(one, bytes) == CUDA_SUCCESS && cuMemUnmap(two, bytes) == CUDA_SUCCESS);
	CHECK(cuMemRetainAllocationHandle(&again, (void *)(three + 7)) == CUDA_SUCCESS && again == handle);
	CHECK(cuMemUnmap(three, half) == CUDA_SUCCESS);
	CHECK(device->swapped == bytes);	/* mapped nowhere, but with a handle */
	CHECK(double_in(device, 4 << 20) && double_out(device, UINT64_MAX) && double_in(device, UINT64_MAX) == bytes);
	map(two, bytes, handle);
	CHECK(have(two, bytes, 12));
	CHECK(cuMemUnmap(two, bytes) == CUDA_SUCCESS && cuMemRelease(again) == CUDA_SUCCESS);
	CHECK(device->resident == pool_kept(device) && device->swapped == 0);
	double_agree(device);
}

/* The driver gives values out again; the program never has two handles with one value. */
static void test_names(void)
{
	enum { COUNT = 24, MORE = 48 };
	CUmemAllocationProp prop = movable(), got;
	CUmemGenericAllocationHandle handle[MORE];
	size_t count;
	bool again = false;

	start();
	for (count = 0; count < COUNT; count++)
		handle[count] = create((1 + count % 3) * PAGE);
	CHECK(double_out(device, UINT64_MAX) != 0);
	/* Of both kinds, movable and fixed. */
	for (; count < MORE; count++) {
		prop.allocFlags.compressionType = count % 2;
		CHECK(cuMemCreate(&handle[count], (1 + count % 3) * PAGE, &prop, 0) == CUDA_SUCCESS);
		again |= handle[count] >> 48 == 0x6767;
		for (size_t i = 0; i < count; i++)
			CHECK(handle[i] != handle[count]);
	}
	CHECK(again);	/* otherwise this tests nothing */
	for (size_t i = 0; i < count; i++) {
		const CUdeviceptr address = reserve((1 + i % 3) * PAGE);

		CHECK(cuMemGetAllocationPropertiesFromHandle(&got, handle[i]) == CUDA_SUCCESS);
		CHECK(got.allocFlags.compressionType == (i >= COUNT ? i % 2 : 0));
		map(address, (1 + i % 3) * PAGE, handle[i]);
		write_all(address, (1 + i % 3) * PAGE, i);
		CHECK(have(address, (1 + i % 3) * PAGE, i));
		CHECK(cuMemRelease(handle[i]) == CUDA_SUCCESS &&
		      cuMemUnmap(address, (1 + i % 3) * PAGE) == CUDA_SUCCESS);
		double_agree(device);
	}
	CHECK(device->resident == pool_kept(device) && device->swapped == 0 && device->foreign == 0);
}

/* Exported memory has one handle of the driver's from then on, wherever it was, and stays. */
static void test_export(void)
{
	const size_t bytes = 36 << 20;
	CUmemAllocationProp prop = movable();
	CUmemGenericAllocationHandle handle, imported;
	CUdeviceptr address, other;
	int fd = -1;

	start();
	prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	prop.allocFlags.gpuDirectRDMACapable = 1;	/* no device that uses it is open */
	CHECK(cuMemCreate(&handle, bytes, &prop, 0) == CUDA_SUCCESS);
	address = reserve(bytes);
	other = reserve(bytes);
	map(address, bytes, handle);
	write_all(address, bytes, 3);
	CHECK(double_out(device, UINT64_MAX) == bytes && double_in(device, 4 << 20) && device->foreign == 0);
	CHECK(cuMemExportToShareableHandle(&fd, handle, prop.requestedHandleTypes, 0) == CUDA_SUCCESS && fd >= 0);
	CHECK(device->foreign == bytes && device->resident - pool_kept(device) == bytes && device->swapped == 0);
	double_agree(device);
	CHECK(double_out(device, UINT64_MAX) == 0 && have(address, bytes, 3));
	CHECK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, prop.requestedHandleTypes) ==
	      CUDA_SUCCESS);
	map(other, bytes, imported);
	write_all(address, bytes, 4);
	CHECK(have(other, bytes, 4));
	CHECK(cuMemUnmap(other, bytes) == CUDA_SUCCESS && cuMemRelease(imported) == CUDA_SUCCESS);
	CHECK(cuMemUnmap(address, bytes) == CUDA_SUCCESS && cuMemRelease(handle) == CUDA_SUCCESS);
	close(fd);
	CHECK(device->foreign == 0 && device->resident == pool_kept(device));
	double_agree(device);
}

/* Every call that makes memory known to another process is noted for the program (workset.c). */
static int export_to_share(__typeof__(&cuMemExportToShareableHandle) how)
{
	CUmemAllocationProp prop = movable();
	CUmemGenericAllocationHandle handle;
	int fd;

	prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	CHECK(cuMemCreate(&handle, PAGE, &prop, 0) == CUDA_SUCCESS && !foreign_is_shared());
	CHECK(how(&fd, handle, prop.requestedHandleTypes, 0) == CUDA_SUCCESS);
	return fd;
}

static void test_shared_by_export(void)
{
	start();
	close(export_to_share(cuMemExportToShareableHandle));
	CHECK(foreign_is_shared());
}

static void test_shared_by_import(void)
{
	CUmemGenericAllocationHandle imported;
	int fd;

	start();
	/* As if another process had made it. */
	fd = export_to_share((__typeof__(&cuMemExportToShareableHandle))plain("cuMemExportToShareableHandle"));
	CHECK(!foreign_is_shared());
	CHECK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
					     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ==
	      CUDA_SUCCESS);
	close(fd);
	CHECK(foreign_is_shared());
}

static void test_shared_by_range(void)
{
	CUdeviceptr address;
	int fd;

	start();
	CHECK(cuMemAlloc_v2(&address, PAGE) == CUDA_SUCCESS && !foreign_is_shared());
	CHECK(cuMemGetHandleForAddressRange(&fd, address, PAGE, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) ==
	      CUDA_SUCCESS);
	close(fd);
	CHECK(foreign_is_shared());
}

/* Exportable memory that has moved, mapped, with 8 in it. */
struct export_of {
	CUmemAllocationProp prop;
	CUmemGenericAllocationHandle handle;
	CUdeviceptr address;
	size_t bytes;
};

static struct export_of moved_once(size_t bytes)
{
	struct export_of of = { .prop = movable(), .bytes = bytes, .address = reserve(bytes) };

	of.prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	CHECK(cuMemCreate(&of.handle, bytes, &of.prop, 0) == CUDA_SUCCESS);
	map(of.address, bytes, of.handle);
	write_all(of.address, bytes, 8);
	CHECK(double_out(device, UINT64_MAX) == bytes);
	return of;
}

static CUresult export(const struct export_of *of)
{
	int fd;
	const CUresult result = cuMemExportToShareableHandle(&fd, of->handle, of->prop.requestedHandleTypes, 0);

	if (result == CUDA_SUCCESS)
		close(fd);
	return result;
}

/* Queries of an address, in an object that has moved while others of its batch have not. */
struct question {
	CUdeviceptr address;
	size_t bytes;
	unsigned long long number;	/* BUFFER_ID before the first move */
	bool answered;			/* atomically */
};

/* The queries answered while it moves. */
static void ask_books(struct question *question)
{
	const CUdeviceptr at = question->address + question->bytes / 2 + 5;
	unsigned long long number = 0;
	CUdeviceptr base = 0;
	unsigned int type = 0;
	size_t size = 0;
	bool managed = true;

	CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == CUDA_SUCCESS &&
	      type == CU_MEMORYTYPE_DEVICE);
	CHECK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at) == CUDA_SUCCESS && !managed);
	CHECK(cuMemGetAddressRange_v2(&base, &size, at) == CUDA_SUCCESS && base == question->address &&
	      size == question->bytes);
	CHECK(cuPointerGetAttribute(&number, CU_POINTER_ATTRIBUTE_BUFFER_ID, at) == CUDA_SUCCESS);
	CHECK(!question->number || number == question->number);
	question->number = number;
}

/* The queries that the driver answers once nothing moves. */
static void *ask_driver(void *argument)
{
	CUpointer_attribute kinds[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
					CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR };
	const CUmemLocation location = writable.location;
	struct question *question = argument;
	const CUdeviceptr at = question->address + 5;
	CUdeviceptr pointer = 0, begin = 0;
	unsigned long long flags = 0;
	unsigned int type = 0;
	size_t size = 0;
	CUcontext of;
	void *data[] = { &type, &pointer, &of, &begin };

	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at) == CUDA_SUCCESS &&
	      size == question->bytes);
	CHECK(cuPointerGetAttributes(4, kinds, data, at) == CUDA_SUCCESS);
	CHECK(type == CU_MEMORYTYPE_DEVICE && pointer == at && begin == question->address);
	CHECK(cuMemGetAccess(&flags, &location, at) == CUDA_SUCCESS && flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	__atomic_store_n(&question->answered, true, __ATOMIC_RELEASE);
	return NULL;
}

static void *move_all_out(void *unused)
{
	double_out(device, UINT64_MAX);
	return unused;
}

/* Queries of an address give the same before the first move, during it and after. */
static void test_questions(void)
{
	const size_t bytes[2] = { 20 << 20, 64 << 20 };
	CUmemGenericAllocationHandle handle[2];
	struct question question = { .bytes = bytes[0] };
	pthread_t asking, moving;
	CUdeviceptr address[2];

	start();
	for (int i = 0; i < 2; i++) {
		handle[i] = create(bytes[i]);
		address[i] = reserve(bytes[i]);
		map(address[i], bytes[i], handle[i]);
		write_all(address[i], bytes[i], (uint64_t)i);
	}
	question.address = address[0];
	ask_books(&question);
	CHECK(ask_driver(&question) == NULL && question.answered);
	question.answered = false;
	/* The first object gets to its new place, by a copy of 16 MiB and two of 2, while the other is still being
	 * copied. */
	((void (*)(int, uint64_t))plain("fake_memory_let"))(0, 3);
	CHECK(!pthread_create(&moving, NULL, move_all_out, NULL));
	while (place(address[0]) != CU_MEM_LOCATION_TYPE_HOST_NUMA)
		usleep(1000);
	ask_books(&question);
	CHECK(!pthread_create(&asking, NULL, ask_driver, &question));
	usleep(20000);
	CHECK(!__atomic_load_n(&question.answered, __ATOMIC_ACQUIRE));
	((void (*)(int, uint64_t))plain("fake_memory_let"))(0, UINT64_MAX);
	CHECK(!pthread_join(asking, NULL) && !pthread_join(moving, NULL));
	ask_books(&question);
	while (device->resident)	/* an object that was queried during the search has stayed */
		double_out(device, UINT64_MAX);
	double_in(device, UINT64_MAX);
	ask_books(&question);
	for (int i = 0; i < 2; i++) {
		CHECK(have(address[i], bytes[i], (uint64_t)i));
		CHECK(cuMemUnmap(address[i], bytes[i]) == CUDA_SUCCESS && cuMemRelease(handle[i]) == CUDA_SUCCESS);
	}
	double_agree(device);
}

static void *stay_inside(void *ready)
{
	gate_enter();
	__atomic_store_n((bool *)ready, true, __ATOMIC_RELEASE);
	usleep(800000);
	gate_leave();
	return NULL;
}

/* An export waits for running work, as the driver would not refuse it for that; it does not wait for a copy that does
 * not end, which keeps its memory until it does. */
static void test_export_waits(void)
{
	void (*hold)(bool);
	struct export_of one, two;
	bool ready = false;
	pthread_t thread;

	start();
	hold = (void (*)(bool))plain("fake_memory_hold");
	one = moved_once(20 << 20);
	two = moved_once(36 << 20);
	CHECK(!pthread_create(&thread, NULL, stay_inside, &ready));
	while (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE))
		usleep(1000);
	CHECK(export(&one) == CUDA_SUCCESS);
	CHECK(!pthread_join(thread, NULL));
	CHECK(device->foreign == one.bytes && have(one.address, one.bytes, 8));
	double_agree(device);
	hold(true);
	device->mover->copy_us = 10000;
	CHECK(export(&two) == CUDA_ERROR_NOT_READY);
	device->mover->copy_us = 60000000;
	CHECK(export(&one) == CUDA_SUCCESS);
	hold(false);
	CHECK(export(&two) == CUDA_SUCCESS);	/* once the copy has ended */
	CHECK(device->foreign == one.bytes + two.bytes && device->swapped == 0);
	CHECK(have(two.address, two.bytes, 8));
	double_agree(device);
	CHECK(cuMemUnmap(two.address, two.bytes) == CUDA_SUCCESS && cuMemRelease(two.handle) == CUDA_SUCCESS);
	CHECK(cuMemUnmap(one.address, one.bytes) == CUDA_SUCCESS && cuMemRelease(one.handle) == CUDA_SUCCESS);
	CHECK(device->foreign == 0 && device->resident == pool_kept(device));
	double_agree(device);
}

/* During an export the memory exists twice: both are charged, or no copy is made. */
static void test_export_charged(void)
{
	const size_t bytes = 36 << 20;
	struct export_of of;

	start();
	of = moved_once(bytes);
	CHECK(double_in(device, 16 << 20) != 0);
	double_swap(false);
	double_limit(device->resident + bytes - PAGE);
	CHECK(export(&of) == CUDA_ERROR_OUT_OF_MEMORY && device->foreign == 0);
	CHECK(have(of.address, bytes, 8));
	double_agree(device);
	double_limit(device->resident + bytes);	/* memory in the host comes in */
	double_limit(2 * bytes);
	CHECK(device->resident == bytes && export(&of) == CUDA_SUCCESS);
	CHECK(device->foreign == bytes && device->resident == bytes && have(of.address, bytes, 8));
	double_agree(device);
}

/* Checks that the GPU has only what is kept, and `bytes` of fixed memory. */
static void has_fixed(uint64_t bytes)
{
	CHECK(double_out(device, UINT64_MAX) == 0);
	CHECK(device->foreign == bytes && device->resident - pool_kept(device) == bytes && device->swapped == 0);
	double_agree(device);
}

static CUmemGenericAllocationHandle make_multicast(size_t bytes)
{
	const CUmulticastObjectProp prop = { .numDevices = 1, .size = bytes,
					     .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
	CUmemGenericAllocationHandle handle;

	CHECK(cuMulticastCreate(&handle, &prop) == CUDA_SUCCESS && cuMulticastAddDevice(handle, 0) == CUDA_SUCCESS);
	return handle;
}

/* Creates movable or fixed memory, as the program does. */
static CUmemGenericAllocationHandle create_either(size_t bytes, bool fixed)
{
	CUmemAllocationProp prop = movable();
	CUmemGenericAllocationHandle handle;

	prop.allocFlags.compressionType = fixed ? CU_MEM_ALLOCATION_COMP_GENERIC : 0;
	CHECK(cuMemCreate(&handle, bytes, &prop, 0) == CUDA_SUCCESS);
	return handle;
}

/* Memory bound by its handle, or where it is mapped, lives on without either, and stays charged until it is unbound. */
static void test_bound(void)
{
	enum { BYTES = 20 << 20, OFFSET = 4 << 20 };
	CUmemGenericAllocationHandle object, handle;
	CUdeviceptr address;

	start();
	object = make_multicast(64 << 20);
	address = reserve(BYTES);
	for (int fixed = 0; fixed < 2; fixed++) {
		handle = create_either(BYTES, fixed);
		CHECK(fixed || double_out(device, UINT64_MAX) == BYTES);
		CHECK(cuMulticastBindMem(object, OFFSET, handle, 0, BYTES, 1) == CUDA_ERROR_INVALID_VALUE);
		CHECK(cuMulticastBindMem(object, OFFSET, handle, 0, BYTES, 0) == CUDA_SUCCESS);
		CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
		has_fixed(BYTES);
		CHECK(cuMulticastUnbind(object, 0, 0, OFFSET) == CUDA_ERROR_INVALID_VALUE);
		has_fixed(BYTES);
		CHECK(cuMulticastUnbind(object, 0, OFFSET, BYTES) == CUDA_SUCCESS);
		has_fixed(0);
		/* Bound by its address. Either of two bindings keeps it. */
		handle = create_either(BYTES, fixed);
		map(address, BYTES, handle);
		CHECK(cuMulticastBindAddr(object, 0, address + OFFSET, BYTES - OFFSET, 0) == CUDA_SUCCESS);
		CHECK(cuMulticastBindMem(object, 32 << 20, handle, 0, OFFSET, 0) == CUDA_SUCCESS);
		CHECK(cuMemRelease(handle) == CUDA_SUCCESS && cuMemUnmap(address, BYTES) == CUDA_SUCCESS);
		has_fixed(BYTES);
		CHECK(cuMulticastUnbind(object, 0, 32 << 20, OFFSET) == CUDA_SUCCESS);
		has_fixed(BYTES);
		CHECK(cuMulticastUnbind(object, 0, 0, BYTES - OFFSET) == CUDA_SUCCESS);
		has_fixed(0);
	}
	CHECK(cuMemRelease(object) == CUDA_SUCCESS);
}

/* The memory of a freed allocation goes to no other while it is bound. */
static void test_bound_allocation(void)
{
	CUmemGenericAllocationHandle object;
	CUdeviceptr address, other;

	start();
	object = make_multicast(64 << 20);
	CHECK(cuMemAlloc_v2(&address, 4 << 20) == CUDA_SUCCESS);
	CHECK(double_out(device, UINT64_MAX) == 4 << 20);
	CHECK(cuMulticastBindAddr(object, 62 << 20, address, 4 << 20, 0) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMulticastUnbind(object, 0, 62 << 20, 2 << 20) == CUDA_ERROR_INVALID_VALUE);	/* nor a part of it */
	CHECK(cuMulticastBindAddr(object, 0, address, 4 << 20, 0) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	has_fixed(4 << 20);
	CHECK(cuMemAlloc_v2(&other, 4 << 20) == CUDA_SUCCESS && device->resident == 8 << 20);
	CHECK(double_out(device, UINT64_MAX) == 4 << 20);
	double_agree(device);
	CHECK(cuMemFree_v2(other) == CUDA_SUCCESS);
	has_fixed(4 << 20);
	CHECK(cuMulticastUnbind(object, 0, 0, 4 << 20) == CUDA_SUCCESS);
	has_fixed(0);
}

/* A multicast object with neither a handle nor a mapping goes, and releases the memory bound to it. An object that
 * another process may have lives on. */
static void test_bound_to_what_goes(void)
{
	enum { BYTES = 6 << 20 };
	CUmemGenericAllocationHandle object, handle;
	CUdeviceptr address;
	int fd;

	start();
	address = reserve(BYTES);
	for (int exported = 0; exported < 2; exported++) {
		object = make_multicast(BYTES);
		handle = create(BYTES);
		CHECK(cuMulticastBindMem(object, 0, handle, 0, BYTES, 0) == CUDA_SUCCESS);
		CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
		map(address, BYTES, object);
		if (exported) {
			CHECK(cuMemExportToShareableHandle(&fd, object, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
			      CUDA_SUCCESS);
			close(fd);
		}
		CHECK(cuMemRelease(object) == CUDA_SUCCESS);
		has_fixed(BYTES);
		CHECK(cuMemUnmap(address, BYTES) == CUDA_SUCCESS);
		CHECK(device->foreign == (exported ? BYTES : 0));
		if (!exported)
			has_fixed(0);
	}
}

static void test_shared_by_multicast(void)
{
	CUmemGenericAllocationHandle object;

	start();
	object = make_multicast(PAGE);
	CHECK(!foreign_is_shared() && cuMulticastBindMem(object, 0, create(PAGE), 0, PAGE, 0) == CUDA_SUCCESS);
	CHECK(foreign_is_shared());
}

static CUarrayMapInfo tile(CUarray array, unsigned int first, unsigned int count, CUmemGenericAllocationHandle handle)
{
	return (CUarrayMapInfo){
		.resourceType = CU_RESOURCE_TYPE_ARRAY, .resource.array = array,
		.subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL,
		.subresource.sparseLevel = { .offsetY = first * 512, .extentWidth = 1024, .extentHeight = count * 512,
					     .extentDepth = 1 },
		.memOperationType = handle ? CU_MEM_OPERATION_TYPE_MAP : CU_MEM_OPERATION_TYPE_UNMAP,
		.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC, .memHandle.memHandle = handle, .deviceBitMask = 1,
	};
}

/* Memory of a sparse array is charged until each of its tiles is unmapped or mapped to other memory, or the array is
 * destroyed. */
static void test_bound_to_array(void)
{
	enum { BYTES = 4 << 20 };
	const CUDA_ARRAY3D_DESCRIPTOR about = { .Width = 1024, .Height = 2048, .Depth = 1, .Format = CU_AD_FORMAT_FLOAT,
						.NumChannels = 1, .Flags = CUDA_ARRAY3D_SPARSE };
	CUmemGenericAllocationHandle handle[2];
	CUarrayMapInfo maps[3];
	CUarray array;

	start();
	CHECK(cuArray3DCreate_v2(&array, &about) == CUDA_SUCCESS);
	for (int fixed = 0; fixed < 2; fixed++) {
		for (int i = 0; i < 2; i++)
			handle[i] = create_either(BYTES, fixed);
		maps[0] = tile(array, 0, 1, handle[0]);
		maps[1] = tile(array, 1, 1, handle[0]);
		maps[2] = tile(array, 2, 1, handle[1]);
		CHECK(cuMemMapArrayAsync(maps, 3, NULL) == CUDA_SUCCESS);
		CHECK(maps[0].memHandle.memHandle == handle[0]);	/* the handles are the program's */
		CHECK(cuMemRelease(handle[0]) == CUDA_SUCCESS && cuMemRelease(handle[1]) == CUDA_SUCCESS);
		has_fixed(2 * BYTES);
		maps[0] = tile(array, 0, 1, 0);
		CHECK(cuMemMapArrayAsync(maps, 1, NULL) == CUDA_SUCCESS);
		has_fixed(2 * BYTES);
		handle[0] = create_either(BYTES, fixed);
		maps[1] = tile(array, 1, 1, handle[0]);
		CHECK(cuMemMapArrayAsync_ptsz(&maps[1], 1, NULL) == CUDA_SUCCESS);
		CHECK(cuMemRelease(handle[0]) == CUDA_SUCCESS);
		has_fixed(2 * BYTES);
		if (!fixed) {	/* two tiles at once */
			maps[0] = tile(array, 1, 2, 0);
			CHECK(cuMemMapArrayAsync(maps, 1, NULL) == CUDA_SUCCESS);
			has_fixed(0);
		}
	}
	CHECK(cuArrayDestroy(array) == CUDA_SUCCESS);
	has_fixed(0);
}

/* The same for several tiles mapped at once, and then unmapped, or mapped to other memory, one by one. */
static void test_bound_in_part(void)
{
	enum { BYTES = 8 << 20, PIECE = 4 << 20 };
	const CUDA_ARRAY3D_DESCRIPTOR about = { .Width = 1024, .Height = 2048, .Depth = 1, .Format = CU_AD_FORMAT_FLOAT,
						.NumChannels = 1, .Flags = CUDA_ARRAY3D_SPARSE };
	CUmemGenericAllocationHandle object, handle, other;
	CUarrayMapInfo maps[1];
	CUarray array;

	start();
	object = make_multicast(64 << 20);
	CHECK(cuArray3DCreate_v2(&array, &about) == CUDA_SUCCESS);
	for (int fixed = 0; fixed < 2; fixed++) {
		handle = create_either(BYTES, fixed);
		maps[0] = tile(array, 0, 4, handle);
		CHECK(cuMemMapArrayAsync(maps, 1, NULL) == CUDA_SUCCESS && cuMemRelease(handle) == CUDA_SUCCESS);
		has_fixed(BYTES);
		maps[0] = tile(array, 1, 1, 0);
		CHECK(cuMemMapArrayAsync(maps, 1, NULL) == CUDA_SUCCESS);
		has_fixed(BYTES);
		other = create_either(PIECE, fixed);
		maps[0] = tile(array, 2, 2, other);
		CHECK(cuMemMapArrayAsync(maps, 1, NULL) == CUDA_SUCCESS && cuMemRelease(other) == CUDA_SUCCESS);
		has_fixed(BYTES + PIECE);
		maps[0] = tile(array, 0, 2, 0);		/* the end of the first mapping */
		CHECK(cuMemMapArrayAsync(maps, 1, NULL) == CUDA_SUCCESS);
		has_fixed(PIECE);
		maps[0] = tile(array, 0, 4, 0);
		CHECK(cuMemMapArrayAsync(maps, 1, NULL) == CUDA_SUCCESS);
		has_fixed(0);
		/* The same for a multicast object. */
		handle = create_either(BYTES, fixed);
		CHECK(cuMulticastBindMem(object, 0, handle, 0, BYTES, 0) == CUDA_SUCCESS &&
		      cuMemRelease(handle) == CUDA_SUCCESS);
		handle = create_either(BYTES, fixed);
		CHECK(cuMulticastBindMem(object, BYTES, handle, 0, BYTES, 0) == CUDA_SUCCESS &&
		      cuMemRelease(handle) == CUDA_SUCCESS);
		has_fixed(2 * BYTES);
		CHECK(cuMulticastUnbind(object, 0, PIECE / 2, PIECE) == CUDA_SUCCESS);	/* in the middle of the first */
		has_fixed(2 * BYTES);
		CHECK(cuMulticastUnbind(object, 0, PIECE, BYTES) == CUDA_SUCCESS); /* to the middle of the second */
		has_fixed(2 * BYTES);
		CHECK(cuMulticastUnbind(object, 0, 0, PIECE / 2) == CUDA_SUCCESS);
		has_fixed(BYTES);
		CHECK(cuMulticastUnbind(object, 0, 0, 2 * BYTES) == CUDA_SUCCESS);
		has_fixed(0);
	}
	CHECK(cuMemRelease(object) == CUDA_SUCCESS && cuArrayDestroy(array) == CUDA_SUCCESS);
}

/* The work of another thread within a call that frees, right after the driver's call: the driver gives it the freed
 * value. */
static struct {
	void *(*other)(void *);	/* NULL: nothing */
	CUresult refusal;	/* returned instead */
	CUmemGenericAllocationHandle handle;
	CUdeviceptr address;
	CUarray array;
} within;

static __typeof__(real.cuMemRelease) release;
static __typeof__(real.cuMemUnmap) unmap;
static __typeof__(real.cuArrayDestroy) destroy;

static CUresult freed(CUresult result)
{
	void *(*const other)(void *) = within.other;
	pthread_t thread;

	within.other = NULL;
	if (other && result == CUDA_SUCCESS)
		CHECK(!pthread_create(&thread, NULL, other, NULL) && !pthread_join(thread, NULL));
	return result;
}

static CUresult release_within(CUmemGenericAllocationHandle handle)
{
	return within.refusal ? within.refusal : freed(release(handle));
}

static CUresult unmap_within(CUdeviceptr address, size_t bytes)
{
	return within.refusal ? within.refusal : freed(unmap(address, bytes));
}

static CUresult destroy_within(CUarray array)
{
	return within.refusal ? within.refusal : freed(destroy(array));
}

static void start_within(void)
{
	start();
	release = real.cuMemRelease;
	unmap = real.cuMemUnmap;
	destroy = real.cuArrayDestroy;
	real.cuMemRelease = release_within;
	real.cuMemUnmap = unmap_within;
	real.cuArrayDestroy = destroy_within;
}

static void *create_within(void *unused)
{
	within.handle = create_either(4 << 20, true);
	return unused;
}

/* The driver gives the value of a handle out again at once: a created handle is not taken for the released one. A
 * handle that the driver refuses to release stays in the books. */
static void test_reused_handle(void)
{
	CUmemGenericAllocationHandle handle;

	start_within();
	handle = create_either(4 << 20, true);
	within.refusal = CUDA_ERROR_UNKNOWN;
	CHECK(cuMemRelease(handle) == CUDA_ERROR_UNKNOWN);
	has_fixed(4 << 20);
	within.refusal = CUDA_SUCCESS;
	within.other = create_within;
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS && within.handle == handle);
	has_fixed(4 << 20);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	has_fixed(0);
}

static void *map_within(void *unused)
{
	create_within(unused);
	map(within.address, 4 << 20, within.handle);
	CHECK(cuMemRelease(within.handle) == CUDA_SUCCESS);
	return unused;
}

/* The same for addresses: a new mapping is not taken for the old one. */
static void test_reused_mapping(void)
{
	CUmemGenericAllocationHandle handle;

	start_within();
	handle = create_either(4 << 20, true);
	within.address = reserve(4 << 20);
	map(within.address, 4 << 20, handle);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	within.refusal = CUDA_ERROR_UNKNOWN;
	CHECK(cuMemUnmap(within.address, 4 << 20) == CUDA_ERROR_UNKNOWN);
	has_fixed(4 << 20);
	within.refusal = CUDA_SUCCESS;
	within.other = map_within;
	CHECK(cuMemUnmap(within.address, 4 << 20) == CUDA_SUCCESS);
	has_fixed(4 << 20);
	CHECK(cuMemUnmap(within.address, 4 << 20) == CUDA_SUCCESS);
	has_fixed(0);
	within.refusal = CUDA_ERROR_INVALID_VALUE;
	CHECK(cuMemUnmap(within.address, (size_t)1 << 62) == CUDA_ERROR_INVALID_VALUE);	/* at once */
}

static void *map_object_within(void *unused)
{
	within.handle = create(4 << 20);
	map(within.address, 4 << 20, within.handle);
	return unused;
}

/* The same for movable memory: a thread may try to map it until the addresses are free. */
static void test_reused_view(void)
{
	CUmemGenericAllocationHandle old, mapped;

	start_within();
	old = create(12 << 20);
	within.address = reserve(12 << 20);
	map(within.address, 12 << 20, old);
	write_all(within.address, 12 << 20, 5);
	within.refusal = CUDA_ERROR_UNKNOWN;
	CHECK(cuMemUnmap(within.address, 12 << 20) == CUDA_ERROR_UNKNOWN);
	within.refusal = CUDA_SUCCESS;
	CHECK(double_out(device, UINT64_MAX) == 12 << 20 && have(within.address, 12 << 20, 5));
	within.other = map_object_within;
	CHECK(cuMemUnmap(within.address, 12 << 20) == CUDA_SUCCESS);
	CHECK(cuMemRetainAllocationHandle(&mapped, (void *)within.address) == CUDA_SUCCESS && mapped == within.handle);
	CHECK(cuMemRelease(mapped) == CUDA_SUCCESS);
	write_all(within.address, 4 << 20, 6);
	CHECK(double_out(device, UINT64_MAX) == 4 << 20 && have(within.address, 4 << 20, 6));
	CHECK(cuMemRelease(old) == CUDA_SUCCESS && device->swapped == 4 << 20);
	CHECK(cuMemUnmap(within.address, 4 << 20) == CUDA_SUCCESS && cuMemRelease(within.handle) == CUDA_SUCCESS);
	CHECK(device->resident == pool_kept(device) && device->swapped == 0);
	double_agree(device);
}

static const CUDA_ARRAY3D_DESCRIPTOR plain_array = { .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT,
						     .NumChannels = 1 };
static const CUDA_ARRAY3D_DESCRIPTOR sparse_array = { .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT,
						      .NumChannels = 1, .Flags = CUDA_ARRAY3D_SPARSE };

static CUarray plain_of_4m(void)
{
	CUarray array;

	CHECK(cuArray3DCreate_v2(&array, &plain_array) == CUDA_SUCCESS);
	return array;
}

static CUarray sparse_of_4m(void)
{
	CUarrayMapInfo info;
	CUarray array;

	CHECK(cuArray3DCreate_v2(&array, &sparse_array) == CUDA_SUCCESS);
	create_within(NULL);
	info = tile(array, 0, 1, within.handle);
	CHECK(cuMemMapArrayAsync(&info, 1, NULL) == CUDA_SUCCESS && cuMemRelease(within.handle) == CUDA_SUCCESS);
	return array;
}

static void *plain_within(void *unused)
{
	enter_context();
	within.array = plain_of_4m();
	return unused;
}

static void *sparse_within(void *unused)
{
	enter_context();
	within.array = sparse_of_4m();
	return unused;
}

/* The same for arrays, with memory of their own or the program's. */
static void test_reused_array(void)
{
	CUarray array;

	start_within();
	for (int sparse = 0; sparse < 2; sparse++) {
		array = sparse ? sparse_of_4m() : plain_of_4m();
		within.refusal = CUDA_ERROR_UNKNOWN;
		CHECK(cuArrayDestroy(array) == CUDA_ERROR_UNKNOWN);
		has_fixed(4 << 20);
		within.refusal = CUDA_SUCCESS;
		within.other = sparse ? sparse_within : plain_within;
		CHECK(cuArrayDestroy(array) == CUDA_SUCCESS && within.array == array);
		has_fixed(4 << 20);
		CHECK(cuArrayDestroy(array) == CUDA_SUCCESS);
		has_fixed(0);
	}
}

/* A context whose value the driver gives out again as soon as it is destroyed. */
static struct {
	CUcontext context;
	CUdeviceptr address;		/* of memory in the new context */
	pthread_t thread;
	pid_t number;			/* of the thread; these three atomically */
	bool made, used;
} reused;

static CUresult make_again(CUcontext *made, unsigned int flags, CUdevice ordinal)
{
	CHECK(!flags && !ordinal);
	*made = reused.context;
	return real.cuCtxPushCurrent_v2(reused.context);
}

static void *use_again(void *unused)
{
	CUcontext made;

	__atomic_store_n(&reused.number, gettid(), __ATOMIC_RELEASE);
	CHECK(cuCtxCreate_v2(&made, 0, 0) == CUDA_SUCCESS && made == reused.context);
	__atomic_store_n(&reused.made, true, __ATOMIC_RELEASE);
	CHECK(cuMemAlloc_v2(&reused.address, 4 << 20) == CUDA_SUCCESS);
	__atomic_store_n(&reused.used, true, __ATOMIC_RELEASE);
	return unused;
}

/* Whether the other thread is waiting. */
static bool is_asleep(void)
{
	const pid_t number = __atomic_load_n(&reused.number, __ATOMIC_ACQUIRE);
	char path[64], state = 0;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", (int)number);
	file = number ? fopen(path, "re") : NULL;
	if (file) {
		CHECK(fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
		fclose(file);
	}
	return state == 'S';
}

static CUresult destroy_and_make(CUcontext destroyed)
{
	reused.context = destroyed;
	CHECK(!pthread_create(&reused.thread, NULL, use_again, NULL));
	while (!__atomic_load_n(&reused.used, __ATOMIC_ACQUIRE) &&
	       (__atomic_load_n(&reused.made, __ATOMIC_ACQUIRE) || !is_asleep()))
		sched_yield();
	return CUDA_SUCCESS;
}

/* Memory allocated in the new context does not go with the old one. */
static void test_reused_context(void)
{
	CUdeviceptr before, base;
	CUcontext other;
	size_t bytes;

	start();
	CHECK(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS && cuMemAlloc_v2(&before, 8 << 20) == CUDA_SUCCESS);
	real.cuCtxCreate_v2 = make_again;
	real.cuCtxDestroy_v2 = destroy_and_make;
	CHECK(cuCtxDestroy_v2(other) == CUDA_SUCCESS && !pthread_join(reused.thread, NULL));
	CHECK(cuMemGetAddressRange_v2(&base, &bytes, reused.address) == CUDA_SUCCESS);
	CHECK(base == reused.address && bytes == 4 << 20 && device->resident - pool_kept(device) == 4 << 20);
	double_agree(device);
}

static CUarray create_array(void)
{
	const CUDA_ARRAY_DESCRIPTOR about = { .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT,
					      .NumChannels = 1 };
	CUarray array;

	CHECK(cuArrayCreate_v2(&array, &about) == CUDA_SUCCESS);
	return array;
}

static CUresult give_again(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *about)
{
	CHECK(about->Width == 1024);
	*array = within.array;
	return CUDA_SUCCESS;
}

static void *create_array_within(void *unused)
{
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS && create_array() == within.array);
	return unused;
}

static CUresult destroy_context_within(CUcontext destroyed)
{
	CHECK(destroyed != context);
	return freed(CUDA_SUCCESS);
}

/* Memory that went with a context does not stay charged when another context gets its value at once. */
static void test_reused_in_context(void)
{
	CUcontext other;

	start_within();
	CHECK(cuCtxCreate_v2(&other, 0, 0) == CUDA_SUCCESS);
	within.array = create_array();
	has_fixed(4 << 20);
	real.cuArrayCreate_v2 = give_again;
	real.cuCtxDestroy_v2 = destroy_context_within;
	within.other = create_array_within;
	CHECK(cuCtxDestroy_v2(other) == CUDA_SUCCESS && real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(device->foreign == 4 << 20);
	CHECK(cuArrayDestroy(within.array) == CUDA_SUCCESS);
	has_fixed(0);
}

/* Creates and maps memory that a network device could reach. */
static CUdeviceptr reachable(size_t bytes)
{
	CUmemAllocationProp prop = movable();
	CUmemGenericAllocationHandle handle;
	const CUdeviceptr address = reserve(bytes);

	prop.allocFlags.gpuDirectRDMACapable = 1;
	CHECK(cuMemCreate(&handle, bytes, &prop, 0) == CUDA_SUCCESS);
	map(address, bytes, handle);
	write_all(address, bytes, 6);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	return address;
}

/* An open device keeps such memory on the GPU for good; memory moved before it was opened can still move. */
static void test_outside_open(void)
{
	const size_t bytes = 12 << 20;
	CUdeviceptr before, address;
	int device_file;

	/* A private /dev. */
	CHECK(!unshare(geteuid() ? CLONE_NEWUSER | CLONE_NEWNS : CLONE_NEWNS));
	CHECK(!mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) && !mount("none", "/dev", "tmpfs", 0, NULL));
	CHECK(!mkdir("/dev/infiniband", 0700));
	start();
	before = reachable(bytes);
	CHECK(double_out(device, UINT64_MAX) == bytes && device->foreign == 0);
	device_file = open("/dev/infiniband/uverbs0", O_CREAT | O_RDWR | O_CLOEXEC, 0600);
	CHECK(device_file >= 0);
	address = reachable(bytes);
	for (int round = 0; round < 2; round++) {
		CHECK(double_out(device, UINT64_MAX) == 0 && device->foreign == bytes);
		close(device_file);
		CHECK(have(address, bytes, 6) && have(before, bytes, 6));
	}
	CHECK(double_in(device, UINT64_MAX) == bytes && double_out(device, UINT64_MAX) == bytes);
	double_agree(device);
}

/* Without a free descriptor to look with, a device may be open unseen. */
static void test_outside_unseen(void)
{
	const size_t bytes = 12 << 20;
	CUdeviceptr address;
	struct rlimit most, none;

	start();
	address = reachable(bytes);
	CHECK(!getrlimit(RLIMIT_NOFILE, &most));
	none = (struct rlimit){ 0, most.rlim_max };
	CHECK(!setrlimit(RLIMIT_NOFILE, &none));
	CHECK(double_out(device, UINT64_MAX) == 0 && device->foreign == bytes);
	CHECK(!setrlimit(RLIMIT_NOFILE, &most));
	CHECK(have(address, bytes, 6));
	/* Memory made from here on is tracked again, and no device reaches it. */
	address = reachable(bytes);
	CHECK(double_out(device, UINT64_MAX) == bytes && device->foreign == bytes && have(address, bytes, 6));
	double_agree(device);
}

/* Any single fault may cause errors, but no lost data and no wrong books. */
static void test_faults(void)
{
	const CUmemAllocationProp prop = movable();
	CUmemGenericAllocationHandle handle[2];
	const size_t bytes[2] = { 6 << 20, 18 << 20 };
	CUdeviceptr address[2], alias;
	bool aliased;

	start();
	for (int i = 0; i < 2; i++) {
		if (cuMemAddressReserve(&address[i], bytes[i], 0, 0, 0) != CUDA_SUCCESS)
			address[i] = reserve(bytes[i]);
		if (cuMemCreate(&handle[i], bytes[i], &prop, 0) != CUDA_SUCCESS)
			handle[i] = create(bytes[i]);
		double_agree(device);
		if (cuMemMap(address[i], bytes[i], 0, handle[i], 0) != CUDA_SUCCESS)
			CHECK(cuMemMap(address[i], bytes[i], 0, handle[i], 0) == CUDA_SUCCESS);
		if (cuMemSetAccess(address[i], bytes[i], &writable, 1) != CUDA_SUCCESS)
			CHECK(cuMemSetAccess(address[i], bytes[i], &writable, 1) == CUDA_SUCCESS);
		write_all(address[i], bytes[i], (uint64_t)i);
	}
	if (cuMemAddressReserve(&alias, bytes[1], 0, 0, 0) != CUDA_SUCCESS)
		alias = reserve(bytes[1]);
	for (uint64_t round = 0; round < 3; round++) {
		double_out(device, round == 1 ? 4 << 20 : UINT64_MAX);
		double_agree(device);
		CHECK(have(address[0], bytes[0], round * 10) && have(address[1], bytes[1], round * 10 + 1));
		aliased = cuMemMap(alias, bytes[1], 0, handle[1], 0) == CUDA_SUCCESS;
		if (aliased && cuMemSetAccess(alias, bytes[1], &writable, 1) == CUDA_SUCCESS)
			CHECK(have(alias, bytes[1], round * 10 + 1));
		write_all(address[0], bytes[0], round * 10 + 10);
		write_all(address[1], bytes[1], round * 10 + 11);
		double_in(device, UINT64_MAX);
		double_agree(device);
		CHECK(have(address[0], bytes[0], round * 10 + 10) && have(address[1], bytes[1], round * 10 + 11));
		if (aliased && cuMemUnmap(alias, bytes[1]) != CUDA_SUCCESS)
			CHECK(cuMemUnmap(alias, bytes[1]) == CUDA_SUCCESS);
	}
	double_out(device, UINT64_MAX);
	for (int i = 0; i < 2; i++) {
		if (cuMemRelease(handle[i]) != CUDA_SUCCESS)
			CHECK(cuMemRelease(handle[i]) == CUDA_SUCCESS);
		if (cuMemUnmap(address[i], bytes[i]) != CUDA_SUCCESS)
			CHECK(cuMemUnmap(address[i], bytes[i]) == CUDA_SUCCESS);
		double_agree(device);
	}
	ours_enter();
	pool_trim(device, 0);
	ours_leave();
	double_agree(device);
	CHECK(device->resident + device->swapped <= pool_credited(device));
}

static void test_fuzz(void)
{
	CUcontext other;

	fuzz_prepare();
	start();
	CHECK(((__typeof__(&cuDevicePrimaryCtxRetain))plain("cuDevicePrimaryCtxRetain"))(&other, 1) == CUDA_SUCCESS);
	fuzz(device, context, other);
}

/* For the generator only, not a test by itself. */
static void test_peer(void)
{
	start();
	opened_peer();
}

/* Threads that create, map and free while memory moves under them */

static bool stop; /* atomically */

static void *mapper(void *argument)
{
	const uint64_t number = (uintptr_t)argument, bytes = (3 + number) << 21;
	const CUdeviceptr address = reserve(bytes), alias = reserve(bytes);
	uint64_t round = 0;

	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		const CUmemGenericAllocationHandle handle = create(bytes);
		const uint64_t word = number << 50 | round++ << 30;

		map(address, bytes, handle);
		write_all(address, bytes, word);
		map(alias, bytes, handle);
		CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
		CHECK(have(alias, bytes, word) && cuMemUnmap(alias, bytes) == CUDA_SUCCESS);
		CHECK(have(address, bytes, word) && cuMemUnmap(address, bytes) == CUDA_SUCCESS);
	}
	CHECK(cuMemAddressFree(address, bytes) == CUDA_SUCCESS && cuMemAddressFree(alias, bytes) == CUDA_SUCCESS);
	return NULL;
}

static void test_threads(void)
{
	const char *text = getenv("UNIT_SECONDS");
	const time_t until = time(NULL) + (text ? atoi(text) : 2);
	pthread_t threads[2];

	start();
	for (uintptr_t i = 0; i < 2; i++)
		CHECK(!pthread_create(&threads[i], NULL, mapper, (void *)i));
	while (time(NULL) < until || double_reclaims() <= 10) {
		double_limit((2 + any(16)) << 20);
		if (any(2))
			double_exchange(device, 4 << 20);
		double_limit(UINT64_MAX);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	double_agree(device);
	CHECK(device->swapped == 0 && device->resident == pool_kept(device));
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} tests[] = {
		{ "segments_in_order", test_segments_in_order }, { "many_in_order", test_many_in_order },
		{ "shared_by_export", test_shared_by_export }, { "shared_by_import", test_shared_by_import },
		{ "shared_by_range", test_shared_by_range }, { "shared_by_multicast", test_shared_by_multicast },
		{ "segments", test_segments }, { "segments_are_hot", test_segments_are_hot }, { "early", test_early },
		{ "views", test_views }, { "names", test_names },
		{ "export", test_export }, { "questions", test_questions }, { "export_waits", test_export_waits },
		{ "export_charged", test_export_charged }, { "bound", test_bound },
		{ "bound_allocation", test_bound_allocation },
		{ "bound_to_what_goes", test_bound_to_what_goes }, { "bound_to_array", test_bound_to_array },
		{ "bound_in_part", test_bound_in_part },
		{ "reused_handle", test_reused_handle }, { "reused_mapping", test_reused_mapping },
		{ "reused_view", test_reused_view }, { "reused_array", test_reused_array },
		{ "reused_context", test_reused_context }, { "reused_in_context", test_reused_in_context },
		{ "outside_open", test_outside_open }, { "outside_unseen", test_outside_unseen },
		{ "runs", test_runs }, { "instead", test_instead },
		{ "object_faults", test_faults }, { "fuzz", test_fuzz }, { "peer", test_peer },
		{ "threads", test_threads },
	};

	for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]) && count == 2; i++)
		if (!strcmp(tests[i].name, arguments[1])) {
			tests[i].run();
			return 0;
		}
	return 2;
}
