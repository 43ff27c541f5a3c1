// SPDX-License-Identifier: Apache-2.0
/*
 * turns: a program that knows nothing of ggroupfs and works in two threads. For each line it prints what it launched in
 * 50 ms, until one is "end". After "hold" a kernel of it runs until "let". For "second" it prints what it launched on
 * the second GPU, where it works from the first such line on.
 */

#include "common.h"

#define BYTES (48 << 20)

KERNEL(add_one, sizeof(CUdeviceptr), sizeof(size_t));
void add_one(void **parameters)
{
	uint64_t *words = *(uint64_t **)parameters[0];

	for (size_t i = 0; i < *(size_t *)parameters[1]; i += 512)
		words[i]++;
}

static _Atomic bool let;

KERNEL(holds, sizeof(int));
void holds(void **parameters)
{
	(void)parameters;
	while (!let)
		usleep(1000);
}

KERNEL(does_nothing, sizeof(int));
void does_nothing(void **parameters)
{
	(void)parameters;
}

static CUcontext context;
static CUdeviceptr address;
static size_t count = BYTES / 8;
static _Atomic bool stop;
static _Atomic uint64_t launched, launched_second, asked;
static int zero;

/* Make calls that must be answered without a turn. */
static void *ask(void *unused)
{
	CUevent event;
	CUdeviceptr extra;

	(void)unused;
	DO(cuCtxSetCurrent(context));
	DO(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	while (!stop) {
		CUresult result = cuStreamQuery(NULL);

		CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY);
		DO(cuEventQuery(event));
		DO(cuMemAlloc_v2(&extra, 3 << 20));
		DO(cuMemFree_v2(extra));
		asked++;
		usleep(500);
	}
	DO(cuEventDestroy_v2(event));
	return NULL;
}

static void *work(void *unused)
{
	CUfunction kernel;

	(void)unused;
	DO(cuCtxSetCurrent(context));
	kernel = function("add_one");
	while (!stop) {
		void *parameters[] = { &address, &count };

		DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
		launched++;
		if (launched % 4 == 0)
			DO(cuStreamSynchronize(NULL));
	}
	DO(cuCtxSynchronize());
	return NULL;
}

static void *work_on_second(void *unused)
{
	void *parameters[] = { &zero };
	CUcontext second;
	CUfunction kernel;

	(void)unused;
	DO(cuDevicePrimaryCtxRetain(&second, 1));
	DO(cuCtxSetCurrent(second));
	kernel = function("does_nothing");
	while (!stop) {
		DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
		launched_second++;
		if (launched_second % 4 == 0)
			DO(cuStreamSynchronize(NULL));
	}
	DO(cuCtxSynchronize());
	return NULL;
}

static void hold(void)
{
	void *parameters[] = { &zero };
	CUstream stream;

	DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	DO(cuLaunchKernel(function("holds"), 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

int main(void)
{
	uint64_t *data = malloc(BYTES);
	pthread_t thread, asking, second;
	bool held = false, has_second = false;
	char line[16];

	CHECK(data);
	context = start(0);
	DO(cuMemAlloc_v2(&address, BYTES));
	number(address, data, BYTES);
	CHECK(!pthread_create(&thread, NULL, work, NULL));
	CHECK(!pthread_create(&asking, NULL, ask, NULL));
	puts("ready 0");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin) && strcmp(line, "end\n")) {
		const bool of_second = !strcmp(line, "second\n");
		const uint64_t before = launched, before_second = launched_second, asked_before = asked;

		if (of_second && !has_second)
			CHECK(!pthread_create(&second, NULL, work_on_second, NULL));
		has_second |= of_second;
		let = !strcmp(line, "let\n");
		if (!strcmp(line, "hold\n"))
			hold();
		held = !let && (held || !strcmp(line, "hold\n"));
		usleep(50000);
		/* A free waits for that kernel. */
		while (!held && asked == asked_before)
			usleep(1000);
		printf("launched %llu\n",
		       (unsigned long long)(of_second ? launched_second - before_second : launched - before));
		fflush(stdout);
	}
	stop = true;
	CHECK(!pthread_join(thread, NULL));
	CHECK(!pthread_join(asking, NULL));
	CHECK(!has_second || !pthread_join(second, NULL));
	DO(cuMemcpyDtoH_v2(data, address, BYTES));
	for (size_t i = 0; i < count; i++)
		CHECK(data[i] == i + (i % 512 ? 0 : launched));
	DO(cuMemFree_v2(address));
	return 0;
}
