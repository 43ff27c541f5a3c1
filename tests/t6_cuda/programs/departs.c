// SPDX-License-Identifier: Apache-2.0
/*
 * departs: a program that knows nothing of ggroupfs, works in one thread, and is made to stand by, and moved,
 * meanwhile.
 */

#include "common.h"

#include <dlfcn.h>

#define BYTES (84 << 20)
#define OBJECT (20 << 20)

KERNEL(add_one, sizeof(CUdeviceptr), sizeof(size_t), sizeof(CUdeviceptr), sizeof(CUdeviceptr), sizeof(CUdeviceptr),
       sizeof(CUdeviceptr));
void add_one(void **parameters)
{
	uint64_t *words = *(uint64_t **)parameters[0];

	for (size_t i = 0; i < *(size_t *)parameters[1]; i += 512)
		words[i]++;
}

static CUcontext context;
static CUdeviceptr address;
static size_t count = BYTES / 8;
static _Atomic bool stop;
static _Atomic uint64_t launched;
static _Atomic CUdeviceptr used;	/* most often used, so that it stays in place; 0: none */

/* Ask whether work is done, as another thread of a program does. */
static void *ask(void *unused)
{
	CUevent event;

	(void)unused;
	DO(cuCtxSetCurrent(context));
	DO(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	while (!stop) {
		CUresult result = cuStreamQuery(NULL);

		CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY);
		DO(cuEventQuery(event));
		DO(cuEventSynchronize(event));
		usleep(100);
	}
	DO(cuEventDestroy_v2(event));
	return NULL;
}

static void *work(void *unused)
{
	CUfunction kernel;
	CUdeviceptr extra;

	(void)unused;
	DO(cuCtxSetCurrent(context));
	kernel = function("add_one");
	while (!stop) {
		CUdeviceptr also = used;
		void *parameters[] = { &address, &count, &also, &also, &also, &also };

		DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
		launched++;
		if (launched % 4)
			continue;
		DO(cuCtxSynchronize());
		if (getenv("FAKE_FAIL_LATER"))	/* the fault is not for this */
			continue;
		DO(cuMemAlloc_v2(&extra, 3 << 20));
		DO(cuMemFree_v2(extra));
	}
	DO(cuCtxSynchronize());
	return NULL;
}

/* Memory of the program's own, if it has any. */
struct object {
	CUmemGenericAllocationHandle handle;
	CUdeviceptr address;
};

static void make_object(struct object *object, uint64_t *data)
{
	const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					   .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	const CUmemAccessDesc access = { .location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	if (!getenv("OBJECTS"))
		return;
	DO(cuMemAddressReserve(&object->address, OBJECT, 0, 0, 0));
	DO(cuMemCreate(&object->handle, OBJECT, &prop, 0));
	DO(cuMemMap(object->address, OBJECT, 0, object->handle, 0));
	DO(cuMemSetAccess(object->address, OBJECT, &access, 1));
	number(object->address, data, OBJECT);
}

static void end_object(const struct object *object, uint64_t *data)
{
	if (!object->address)
		return;
	DO(cuMemcpyDtoH_v2(data, object->address, OBJECT));
	for (size_t i = 0; i < OBJECT / 8; i++)
		CHECK(data[i] == i);
	DO(cuMemUnmap(object->address, OBJECT));
	DO(cuMemRelease(object->handle));
	DO(cuMemAddressFree(object->address, OBJECT));
}

/* Make memory of which only a descriptor is left to the program; -1 if it has none. */
static int lend(void)
{
	const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					   .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
					   .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	CUmemGenericAllocationHandle handle;
	int fd = -1;

	if (!getenv("FAKE_LENT"))
		return fd;
	DO(cuMemCreate(&handle, OBJECT, &prop, 0));
	DO(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	DO(cuMemRelease(handle));
	return fd;
}

int main(void)
{
	void (*move)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "fake_move");
	uint64_t (*objects)(bool) = (uint64_t(*)(bool))dlsym(RTLD_DEFAULT, "fake_memory_objects");
	void (*checkpoint)(bool) = (void (*)(bool))dlsym(RTLD_DEFAULT, "fake_checkpoint");
	void (*fail)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "fake_fail_now");
	const bool checkpointed = getenv("CHECKPOINTED");
	uint64_t *data = malloc(BYTES);
	struct object objects_made[2] = { 0 };
	pthread_t thread, asking;
	CUdeviceptr small;
	int lent;

	CHECK(move && objects && checkpoint && fail && data);
	context = start(0);
	DO(cuMemAlloc_v2(&address, BYTES));
	DO(cuMemAlloc_v2(&small, 100));
	number(address, data, BYTES);
	number(small, data, 100);
	CHECK(!pthread_create(&thread, NULL, work, NULL));
	CHECK(!pthread_create(&asking, NULL, ask, NULL));
	make_object(&objects_made[0], data);
	tell("ready", 0);
	make_object(&objects_made[1], data);
	used = objects_made[1].address;
	lent = lend();
	fail();
	tell("armed", 0);
	for (int moves = atoi(getenv("MOVES")); moves; moves--) {
		if (lent >= 0) {
			close(lent);
			lent = -1;
			tell("closed", 0);
		}
		tell("host", objects(true));
		tell("objects", objects(false));
		uint64_t before = launched;

		usleep(50000);
		tell("launched", launched - before);
		if (checkpointed) {
			checkpoint(true);
			tell("checkpointed", 0);
			usleep(50000);
		}
		move(moves);
		if (checkpointed)
			checkpoint(false);
		tell("moved", moves);
	}
	tell("launched", launched);
	stop = true;
	CHECK(!pthread_join(thread, NULL));
	CHECK(!pthread_join(asking, NULL));
	DO(cuMemcpyDtoH_v2(data, address, BYTES));
	for (size_t i = 0; i < count; i++)
		CHECK(data[i] == i + (i % 512 ? 0 : launched));
	DO(cuMemcpyDtoH_v2(data, small, 100));
	for (uint64_t i = 0; i < 100 / 8; i++)
		CHECK(data[i] == i);
	DO(cuMemFree_v2(address));
	DO(cuMemFree_v2(small));
	end_object(&objects_made[0], data);
	end_object(&objects_made[1], data);
	free(data);
	return 0;
}
