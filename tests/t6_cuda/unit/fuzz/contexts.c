// SPDX-License-Identifier: Apache-2.0
/*
 * Contexts that come, allocate, and take all of that with them; and primary ones, which may have other users, or none.
 */
#include "steps.h"

#include <dlfcn.h>

#include "calls.h"
#include "model.h"

static void *plain(const char *name)
{
	void *found = driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);

	CHECK(found);
	return found;
}

/* Allocate in the current context. */
static void allocate(void)
{
	const CUDA_ARRAY_DESCRIPTOR about = { .Width = 1024, .Height = 512, .Format = CU_AD_FORMAT_FLOAT,
					      .NumChannels = 1 };
	CUdeviceptr address;
	CUarray array;

	for (uint64_t i = model_any(4); i; i--)
		DO(cuMemAlloc_v2, (&address, (1 + model_any(6)) * PAGE));
	if (model_any(2))
		DO(cuMemAllocManaged, (&address, PAGE, CU_MEM_ATTACH_GLOBAL));
	if (model_any(2))
		DO(cuArrayCreate_v2, (&array, &about));
}

static void create(CUcontext *context)
{
	CUctxCreateParams params = { 0 };

	switch (model_any(4)) {
	case 0:
		DO(cuCtxCreate, (context, 0, 0));
		break;
	case 1:
		DO(cuCtxCreate_v2, (context, 0, 0));
		break;
	case 2:
		DO(cuCtxCreate_v3, (context, NULL, 0, 0, 0));
		break;
	default:
		DO(cuCtxCreate_v4, (context, &params, 0, 0));
	}
}

void contexts_come_and_go(void)
{
	CUcontext context;

	create(&context);
	allocate();
	switch (model_any(3)) {
	case 0:
		DO(cuCtxDestroy, (context));
		break;
	case 1:
		DO(cuCtxDestroy_v2, (context));
		break;
	default:
		DO(cuCtxDetach, (context));
	}
	CHECK(real.cuCtxSetCurrent(model.context) == CUDA_SUCCESS);
}

/* cuGreenCtxCreate is an entry point that is not caught. */
void contexts_green(void)
{
	static __typeof__(&cuGreenCtxCreate) make;
	CUgreenCtx green;
	CUcontext context;

	if (!make)
		make = (__typeof__(make))plain("cuGreenCtxCreate");
	CHECK(make(&green, NULL, 0, CU_GREEN_CTX_DEFAULT_STREAM) == CUDA_SUCCESS);
	CHECK(real.cuCtxFromGreenCtx(&context, green) == CUDA_SUCCESS);
	CHECK(real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	allocate();
	DO(cuGreenCtxDestroy, (green));
	CHECK(real.cuCtxSetCurrent(model.context) == CUDA_SUCCESS);
}

static CUcontext retain(CUdevice gpu)
{
	static __typeof__(&cuDevicePrimaryCtxRetain) call;
	CUcontext context;

	if (!call)
		call = (__typeof__(call))plain("cuDevicePrimaryCtxRetain");
	CHECK(call(&context, gpu) == CUDA_SUCCESS);
	return context;
}

/*
 * Release the primary contexts: that of the GPU on which memory moves has another user and stays; the other one goes.
 */
void contexts_primary(void)
{
	CHECK(retain(0) == model.context);
	switch (model_any(4)) {
	case 0:
		DO(cuDevicePrimaryCtxRelease, (0));
		break;
	case 1:
		DO(cuDevicePrimaryCtxReset, (1));
		break;
	case 2:
		DO(cuDevicePrimaryCtxReset_v2, (1));
		break;
	default:
		DO(cuDevicePrimaryCtxRelease_v2, (0));
	}
	model.other = retain(1);
}
