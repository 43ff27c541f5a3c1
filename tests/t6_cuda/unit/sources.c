// SPDX-License-Identifier: Apache-2.0
/*
 * Tests of the program's own pools (source.c): `sources NAME` runs one on the double of the driver; FAKE_DEVICES is 2.
 */

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "carry.h"
#include "device.h"
#include "double.h"
#include "library.h"
#include "pool.h"

#define BYTES ((size_t)12 << 20)

static struct device *device;
static CUstream stream;

static void *plain(const char *name)
{
	void *found = driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);

	CHECK(found);
	return found;
}

static void start(void)
{
	__typeof__(&cuDevicePrimaryCtxRetain) retain;
	CUcontext context;

	library_begin();
	CHECK(real.cuInit(0) == CUDA_SUCCESS);
	retain = (__typeof__(retain))plain("cuDevicePrimaryCtxRetain");
	CHECK(retain(&context, 0) == CUDA_SUCCESS && real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	device = device_current();
	CHECK(device && device->elastic);
	device->mover->copy_us = device->mover->work_us = 60000000;	/* for a double made of threads */
	CHECK(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
}

static CUmemoryPool create(CUmemAllocationHandleType types, size_t most)
{
	const CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = types,
				       .maxSize = most, .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	CUmemoryPool pool;

	CHECK(cuMemPoolCreate(&pool, &props) == CUDA_SUCCESS);
	return pool;
}

static CUdeviceptr allocate(CUmemoryPool pool)
{
	CUdeviceptr address;

	CHECK(cuMemAllocFromPoolAsync(&address, BYTES, pool, stream) == CUDA_SUCCESS);
	return address;
}

static uint64_t get(CUmemoryPool pool, CUmemPool_attribute attribute)
{
	cuuint64_t value = 0;

	CHECK(cuMemPoolGetAttribute(pool, attribute, &value) == CUDA_SUCCESS);
	return value;
}

static CUmemoryPool pool_of(CUdeviceptr address)
{
	CUmemoryPool pool = NULL;

	CHECK(cuPointerGetAttribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) == CUDA_SUCCESS);
	return pool;
}

static void free_all(CUdeviceptr address)
{
	CHECK(cuMemFreeAsync(address, stream) == CUDA_SUCCESS && real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
}

static CUresult give(CUmemoryPool pool)
{
	const CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 },
					 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	return cuMemPoolSetAccess(pool, &access, 1);
}

static bool for_the_other(CUdeviceptr address)
{
	return ((bool (*)(CUdeviceptr, CUdevice))plain("fake_memory_accessible"))(address, 1);
}

static void test_moves(void)
{
	const uint64_t word = 77;
	uint64_t got = 0;
	CUdeviceptr address;

	start();
	address = allocate(create(CU_MEM_HANDLE_TYPE_NONE, 0));
	CHECK(device->foreign == 0 && device->resident == BYTES);
	CHECK(cuMemcpyHtoD_v2(address + BYTES - 8, &word, 8) == CUDA_SUCCESS);
	CHECK(double_out(device, UINT64_MAX) == BYTES && device->swapped == BYTES);
	CHECK(cuMemcpyDtoH_v2(&got, address + BYTES - 8, 8) == CUDA_SUCCESS && got == word);
	free_all(address);
	double_agree(device);
}

static void wait_for_it(void *argument)
{
	while (!__atomic_load_n((bool *)argument, __ATOMIC_ACQUIRE))
		usleep(1000);
}

/* Each pool reports its own figures, and its own maximum since that was set to 0. */
static void test_counts(void)
{
	CUmemoryPool pools[2], standard;
	CUdeviceptr addresses[3];
	cuuint64_t zero = 0;
	bool free_now = false;

	start();
	CHECK(real.cuDeviceGetDefaultMemPool(&standard, 0) == CUDA_SUCCESS);
	pools[0] = create(CU_MEM_HANDLE_TYPE_NONE, 0);
	pools[1] = create(CU_MEM_HANDLE_TYPE_NONE, 0);
	addresses[0] = allocate(pools[0]);
	addresses[1] = allocate(pools[0]);
	addresses[2] = allocate(standard);
	CHECK(pool_of(addresses[0]) == pools[0] && pool_of(addresses[2]) == standard);
	CHECK(get(pools[0], CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 2 * BYTES);
	CHECK(get(pools[1], CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0 &&
	      get(standard, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == BYTES);
	/* Frees that the stream has reached, perhaps at once, take effect at the next call that allocates or frees. */
	CHECK(real.cuLaunchHostFunc(stream, wait_for_it, &free_now) == CUDA_SUCCESS);
	CHECK(cuMemFreeAsync(addresses[1], stream) == CUDA_SUCCESS);
	CHECK(get(pools[0], CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == BYTES);
	CHECK(get(pools[0], CU_MEMPOOL_ATTR_USED_MEM_HIGH) == 2 * BYTES);
	CHECK(get(pools[0], CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 2 * BYTES);
	/* Memory freed by one pool is not used by another. */
	addresses[2] = allocate(pools[1]);
	CHECK(addresses[2] != addresses[1] && get(pools[1], CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) == BYTES);
	CHECK(allocate(pools[0]) == addresses[1] && get(pools[0], CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 2 * BYTES);
	__atomic_store_n(&free_now, true, __ATOMIC_RELEASE);
	free_all(addresses[1]);
	CHECK(cuMemPoolSetAttribute(pools[0], CU_MEMPOOL_ATTR_USED_MEM_HIGH, &zero) == CUDA_SUCCESS);
	CHECK(get(pools[0], CU_MEMPOOL_ATTR_USED_MEM_HIGH) == BYTES);
	CHECK(cuMemPoolTrimTo(pools[0], 0) == CUDA_SUCCESS);
	CHECK(get(pools[0], CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == BYTES);
	CHECK(cuMemFree_v2(addresses[0]) == CUDA_SUCCESS && get(pools[0], CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0);
	double_agree(device);
}

/* "Resources are released once there are no more outstanding allocations." */
static void test_destroyed(void)
{
	CUmemoryPool pool, other;
	CUdeviceptr addresses[2];

	start();
	pool = create(CU_MEM_HANDLE_TYPE_NONE, 0);
	addresses[0] = allocate(pool);
	addresses[1] = allocate(pool);
	CHECK(cuMemFreeAsync(addresses[1], stream) == CUDA_SUCCESS);
	CHECK(cuMemPoolDestroy(pool) == CUDA_SUCCESS);
	other = create(CU_MEM_HANDLE_TYPE_NONE, 0);
	CHECK(get(other, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == 0 && double_out(device, UINT64_MAX));
	free_all(addresses[0]);
	CHECK(cuMemPoolTrimTo(other, 0) == CUDA_SUCCESS && cuMemPoolDestroy(other) == CUDA_SUCCESS);
	CHECK(device->resident == pool_kept(device) && device->swapped == 0);
	double_agree(device);
}

/* cuMemAllocAsync takes from the device's current pool. */
static void test_current(void)
{
	__typeof__(&cuDeviceSetMemPool) set;
	CUmemoryPool pool;
	CUdeviceptr address;

	start();
	set = (__typeof__(set))plain("cuDeviceSetMemPool");
	pool = create(CU_MEM_HANDLE_TYPE_NONE, 0);
	CHECK(set(0, pool) == CUDA_SUCCESS);
	CHECK(cuMemAllocAsync(&address, BYTES, stream) == CUDA_SUCCESS);
	CHECK(device->foreign == 0 && get(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == BYTES);
	free_all(address);
}

/* Pools that others can have, and pools with a maximum size, are the driver's: charged, and reported. */
static void test_not_ours(void)
{
	CUmemoryPool pools[2];
	CUdeviceptr address;

	start();
	pools[0] = create(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
	pools[1] = create(CU_MEM_HANDLE_TYPE_NONE, 2 * BYTES);
	for (int i = 0; i < 2; i++) {
		address = allocate(pools[i]);
		CHECK(device->foreign == BYTES && device->resident == BYTES && double_out(device, UINT64_MAX) == 0);
		double_agree(device);
		free_all(address);
		CHECK(device->foreign == 0 && cuMemPoolDestroy(pools[i]) == CUDA_SUCCESS);
	}
}

/* Access for another GPU concerns only the pool, as long as the library serves nothing of it. */
static void test_given(void)
{
	CUmemoryPool pool, other;
	CUdeviceptr plain, first, second;

	start();
	CHECK(cuMemAlloc_v2(&plain, BYTES) == CUDA_SUCCESS);
	pool = create(CU_MEM_HANDLE_TYPE_NONE, 0);
	CHECK(give(pool) == CUDA_SUCCESS && !for_the_other(plain) && device->foreign == 0);
	first = allocate(pool);
	CHECK(device->foreign == BYTES && double_out(device, UINT64_MAX) == BYTES &&
	      double_in(device, UINT64_MAX) == BYTES);
	other = create(CU_MEM_HANDLE_TYPE_NONE, 0);
	second = allocate(other);
	CHECK(give(other) == CUDA_SUCCESS && for_the_other(second));
	CHECK(get(other, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == BYTES);
	free_all(first);
	free_all(second);
	CHECK(allocate(other) && device->foreign >= BYTES);
	double_agree(device);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} tests[] = {
		{ "moves", test_moves }, { "counts", test_counts }, { "destroyed", test_destroyed },
		{ "current", test_current },
		{ "not_ours", test_not_ours }, { "given", test_given },
	};

	for (size_t i = 0; argc == 2 && i < sizeof(tests) / sizeof(tests[0]); i++)
		if (!strcmp(argv[1], tests[i].name)) {
			tests[i].run();
			return 0;
		}
	fprintf(stderr, "sources NAME\n");
	return 2;
}
