/* SPDX-License-Identifier: Apache-2.0 */
/* Make, use and destroy contexts in all possible ways, with launches that are still running. */
#include "common.h"

static int ran;

KERNEL(count, sizeof(int))
{
	__atomic_add_fetch(&ran, *(int *)parameters[0], __ATOMIC_RELAXED);
}

static int launches;

static void launch(CUstream stream)
{
	int one = 1;
	void *parameters[] = { &one };

	DO(cuLaunchKernel(function("count"), 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	launches++;
}

static void use(void)
{
	CUdeviceptr address;
	CUstream stream;

	DO(cuStreamCreate(&stream, 0));
	DO(cuMemAlloc_v2(&address, 8 << 20));
	for (int i = 0; i < 10; i++) {
		launch(NULL);
		launch(stream);
	}
	DO(cuMemcpyHtoD_v2(address, "x", 1));
}

int main(void)
{
	CUcontext first, second;

	DO(cuInit(0));
	for (int i = 0; i < 5; i++) {
		DO(cuCtxCreate_v2(&first, 0, 0));
		use();
		DO(cuCtxCreate_v2(&second, 0, 0));
		use();
		DO(cuCtxDestroy_v2(first));
		use();
		DO(cuCtxDestroy_v2(second));
		CHECK(ran == launches);

		first = start(0);
		use();
		DO(cuDevicePrimaryCtxRetain(&second, 0));
		CHECK(first == second);
		DO(cuDevicePrimaryCtxRelease_v2(0));
		use();
		DO(cuDevicePrimaryCtxRelease_v2(0));
		CHECK(ran == launches);
		EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease_v2(0));

		DO(cuCtxSetCurrent(NULL));
		start(0);
		use();
		DO(cuDevicePrimaryCtxReset_v2(0));
		CHECK(ran == launches);
		DO(cuCtxSetCurrent(NULL));
	}
	return 0;
}
