// SPDX-License-Identifier: Apache-2.0
/* Tests of a single failing driver call and its aftermath: `once NAME` runs one on the double; FAKE_DEVICES is 2. */

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include "carry.h"
#include "double.h"
#include "library.h"
#include "ours.h"

#define BYTES ((size_t)12 << 20)

static struct device *device;
static CUcontext contexts[2];
static CUstream stream;

/* Entry point whose next calls fail, and the number of such calls. */
static const char *failing;	/* accessed atomically */
static unsigned int times;	/* accessed atomically */

static void *plain(const char *name)
{
	void *found = driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);

	CHECK(found);
	return found;
}

/* The thread that met the failure waits at its next return of a context, until `let_go`. */
static bool waits, waiting, let_go;	/* accessed atomically */
static __thread bool came_here;

static void wait_here(void)
{
	came_here = false;
	__atomic_store_n(&waiting, true, __ATOMIC_RELEASE);
	while (!__atomic_load_n(&let_go, __ATOMIC_ACQUIRE))
		usleep(1000);
}

static CUresult on_call(const char *name)
{
	const char *wanted = __atomic_load_n(&failing, __ATOMIC_ACQUIRE);
	unsigned int left = __atomic_load_n(&times, __ATOMIC_ACQUIRE);

	while (wanted && !strcmp(name, wanted) && left)
		if (__atomic_compare_exchange_n(&times, &left, left - 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
			came_here = __atomic_load_n(&waits, __ATOMIC_RELAXED);
			return CUDA_ERROR_UNKNOWN;
		}
	if (came_here && !strcmp(name, "cuCtxPopCurrent_v2"))
		wait_here();
	return CUDA_SUCCESS;
}

static void fail_next(const char *name)
{
	__atomic_store_n(&failing, name, __ATOMIC_RELEASE);
	__atomic_store_n(&times, 1, __ATOMIC_RELEASE);
}

/* Return whether the call that was to fail has failed. */
static bool has_failed(void)
{
	return !__atomic_load_n(&times, __ATOMIC_ACQUIRE);
}

static void start(void)
{
	__typeof__(&cuDevicePrimaryCtxRetain) retain;

	library_begin();
	CHECK(real.cuInit(0) == CUDA_SUCCESS);
	retain = (__typeof__(retain))plain("cuDevicePrimaryCtxRetain");
	for (int i = 0; i < 2; i++)
		CHECK(retain(&contexts[i], i) == CUDA_SUCCESS);
	CHECK(real.cuCtxSetCurrent(contexts[0]) == CUDA_SUCCESS);
	device = device_current();
	CHECK(device && device->elastic);
	device->mover->copy_us = device->mover->work_us = 60000000;
	CHECK(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
	((void (*)(CUresult (*)(const char *)))plain("fake_on_call"))(on_call);
}

static bool for_the_other(CUdeviceptr address)
{
	return ((bool (*)(CUdeviceptr, CUdevice))plain("fake_memory_accessible"))(address, 1);
}

static CUresult enable(void)
{
	CUresult result;

	CHECK(real.cuCtxSetCurrent(contexts[1]) == CUDA_SUCCESS);
	CHECK(device_current());
	result = cuCtxEnablePeerAccess(contexts[0], 0);
	CHECK(real.cuCtxSetCurrent(contexts[0]) == CUDA_SUCCESS);
	return result;
}

/* Access that could not be given to everything does not count as given. */
static void test_peers(void)
{
	static const char *const calls[] = { "cuCtxPushCurrent_v2", "cuMemSetAccess" };
	CUdeviceptr address;

	start();
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS);
	for (int i = 0; i < 2; i++) {
		CHECK(real.cuCtxSetCurrent(contexts[1]) == CUDA_SUCCESS && device_current());
		fail_next(calls[i]);
		CHECK(enable() != CUDA_SUCCESS && has_failed());
	}
	CHECK(enable() == CUDA_SUCCESS && for_the_other(address));
}

/* A GPU that may only read the default pool's memory can do that. */
static void test_readers(void)
{
	const CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 },
					 .flags = CU_MEM_ACCESS_FLAGS_PROT_READ };
	CUmemoryPool pool;
	CUdeviceptr address;

	start();
	CHECK(real.cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS);
	CHECK(cuMemAllocAsync(&address, BYTES, stream) == CUDA_SUCCESS && !for_the_other(address));
	CHECK(cuMemPoolSetAccess(pool, &access, 1) == CUDA_SUCCESS && for_the_other(address));
}

/*
 * Settings of the default pool apply to what the library serves of it, even if the driver could not say which pool it
 * is.
 */
static void test_pools(void)
{
	const CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 },
					 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemoryPool pool;
	CUdeviceptr address;
	cuuint64_t used = 0;

	start();
	CHECK(real.cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS);
	fail_next("cuDeviceGetDefaultMemPool");
	CHECK(cuMemPoolSetAccess(pool, &access, 1) != CUDA_SUCCESS && has_failed() && !for_the_other(address));
	CHECK(cuMemAllocAsync(&address, BYTES, stream) == CUDA_SUCCESS);
	fail_next("cuDeviceGetDefaultMemPool");
	CHECK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) == CUDA_SUCCESS && used == BYTES);
	CHECK(cuMemPoolSetAccess(pool, &access, 1) == CUDA_SUCCESS && for_the_other(address));
}

/* An allocation is charged to its GPU, the pool's or the stream's, whichever context is current. */
static void test_elsewhere(void)
{
	const CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				       .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 } };
	struct device *other;
	CUmemoryPool pools[2];
	CUdeviceptr address;
	CUcontext current;

	start();
	CHECK(real.cuCtxSetCurrent(contexts[1]) == CUDA_SUCCESS);
	other = device_current();
	CHECK(other && other->ordinal == 1);
	fail_next("cuStreamGetCtx");
	CHECK(cuMemAllocAsync(&address, BYTES, stream) != CUDA_SUCCESS && has_failed());
	CHECK(cuMemAllocAsync(&address, BYTES, stream) == CUDA_SUCCESS);
	CHECK(device->resident == BYTES && other->resident == 0);
	CHECK(real.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == contexts[1]);
	CHECK(cuMemFreeAsync(address, stream) == CUDA_SUCCESS);
	CHECK(real.cuCtxSetCurrent(contexts[0]) == CUDA_SUCCESS && real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS && cuMemFree_v2(address) == CUDA_SUCCESS);
	CHECK(device->resident == pool_kept(device) && device->foreign == 0);
	CHECK(cuMemPoolCreate(&pools[0], &props) == CUDA_SUCCESS);
	CHECK(real.cuDeviceGetDefaultMemPool(&pools[1], 1) == CUDA_SUCCESS);
	for (int i = 0; i < 2; i++) {
		CHECK(cuMemAllocFromPoolAsync(&address, BYTES, pools[i], stream) == CUDA_SUCCESS);
		CHECK(other->foreign == BYTES && other->resident == BYTES && device->foreign == 0);
		CHECK(cuMemFreeAsync(address, stream) == CUDA_SUCCESS &&
		      real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
		CHECK(other->foreign == 0 && other->resident == 0);
	}
	fail_next("cuMemPoolDestroy");
	CHECK(cuMemPoolDestroy(pools[0]) != CUDA_SUCCESS && has_failed());
	CHECK(cuMemAllocFromPoolAsync(&address, BYTES, pools[0], stream) == CUDA_SUCCESS && other->foreign == BYTES);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS && cuMemPoolDestroy(pools[0]) == CUDA_SUCCESS);
	double_agree(device);
}

/* Whether a stream is captured: an error leaves the charge right, and nothing stays unmovable for good. */
static void test_captures(void)
{
	CUdeviceptr address;
	CUgraph graph;

	start();
	fail_next("cuStreamIsCapturing");
	CHECK(cuMemAllocAsync(&address, BYTES, stream) == CUDA_SUCCESS && has_failed());
	CHECK(device->resident == BYTES);
	double_agree(device);
	CHECK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS);
	fail_next("cuStreamIsCapturing");
	CHECK(cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS);
	CHECK(double_out(device, UINT64_MAX) == BYTES);
	double_agree(device);
}

/*
 * A running copy is waited for, even if the driver could once not say whether it runs: the double aborts if the ends of
 * the copy are unmapped before.
 */
static void test_copies(void)
{
	const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					   .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	CUmemGenericAllocationHandle handle;
	void (*hold)(bool);

	start();
	hold = (void (*)(bool))plain("fake_memory_hold");
	CHECK(cuMemCreate(&handle, BYTES, &prop, 0) == CUDA_SUCCESS);
	hold(true);
	device->mover->copy_us = 10000;
	fail_next("cuStreamQuery");
	while (!has_failed())	/* a busy machine may not have reached the copy */
		CHECK(double_out(device, UINT64_MAX) == 0);
	device->mover->copy_us = 60000000;
	hold(false);
	while (device->resident)	/* once the copy has ended */
		double_out(device, UINT64_MAX);
	CHECK(device->swapped == BYTES);
	double_agree(device);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
}

static void wait_for_it(void *argument)
{
	while (!__atomic_load_n((bool *)argument, __ATOMIC_ACQUIRE))
		usleep(1000);
}

/* Memory that a stream has freed, and may use until it gets there, is not freed before. */
static void test_frees(void)
{
	CUdeviceptr address, other;
	bool free_now = false;

	start();
	CHECK(cuMemAllocAsync(&address, BYTES, stream) == CUDA_SUCCESS);
	CHECK(real.cuLaunchHostFunc(stream, wait_for_it, &free_now) == CUDA_SUCCESS);
	fail_next("cuEventQuery");
	CHECK(cuMemFreeAsync(address, stream) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&other, BYTES) == CUDA_SUCCESS && has_failed());
	CHECK(device->resident == 2 * BYTES);
	__atomic_store_n(&free_now, true, __ATOMIC_RELEASE);
	CHECK(real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(other) == CUDA_SUCCESS);
	CHECK(device->resident == pool_kept(device));
	double_agree(device);
}

static void *bring_in(void *unused)
{
	double_in(device, BYTES);
	return unused;
}

/*
 * Memory that was to come in, and did not, may be freed as soon as it is let go: by then the books have it on the GPU,
 * and know that.
 */
static void test_books(void)
{
	CUdeviceptr address;
	pthread_t thread;

	start();
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS && double_out(device, UINT64_MAX) == BYTES);
	__atomic_store_n(&waits, true, __ATOMIC_RELAXED);
	fail_next("cuEventQuery");
	CHECK(!pthread_create(&thread, NULL, bring_in, NULL));
	while (!__atomic_load_n(&waiting, __ATOMIC_ACQUIRE))
		usleep(1000);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	__atomic_store_n(&let_go, true, __ATOMIC_RELEASE);
	CHECK(!pthread_join(thread, NULL));
	CHECK(device->resident == pool_kept(device) && device->swapped == 0);
	double_agree(device);
}

/* Either memory in a context that goes leaves the books, or the context stays. */
static void test_contexts(void)
{
	__typeof__(&cuGreenCtxCreate) make;
	CUdeviceptr address;
	CUcontext context;
	CUgreenCtx green;

	start();
	make = (__typeof__(make))plain("cuGreenCtxCreate");
	CHECK(make(&green, NULL, 0, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS);
	CHECK(real.cuCtxFromGreenCtx(&context, green) == CUDA_SUCCESS && real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS);
	fail_next("cuCtxFromGreenCtx");
	CHECK(cuGreenCtxDestroy(green) != CUDA_SUCCESS && has_failed() && device->resident == BYTES);
	CHECK(cuGreenCtxDestroy(green) == CUDA_SUCCESS && device->resident == pool_kept(device));
	CHECK(real.cuCtxSetCurrent(contexts[0]) == CUDA_SUCCESS);
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS);
	fail_next("cuDevicePrimaryCtxGetState");
	CHECK(cuDevicePrimaryCtxReset_v2(0) == CUDA_SUCCESS && has_failed());
	CHECK(device->resident == pool_kept(device));
	double_agree(device);
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} tests[] = {
		{ "peers", test_peers }, { "pools", test_pools }, { "readers", test_readers },
		{ "elsewhere", test_elsewhere },
		{ "captures", test_captures }, { "copies", test_copies }, { "frees", test_frees },
		{ "books", test_books },
		{ "contexts", test_contexts },
	};

	for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]) && count == 2; i++)
		if (!strcmp(tests[i].name, arguments[1])) {
			tests[i].run();
			return 0;
		}
	return 2;
}
