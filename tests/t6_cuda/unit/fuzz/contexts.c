// SPDX-License-Identifier: Apache-2.0
/* A context that comes, allocates, and takes all of it with it. */
#include "steps.h"

#include "calls.h"
#include "model.h"

void contexts_come_and_go(void)
{
	const CUDA_ARRAY_DESCRIPTOR about = { .Width = 1024, .Height = 512, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1 };
	CUdeviceptr address;
	CUcontext context;
	CUarray array;

	DO(cuCtxCreate_v2, (&context, 0, 0));
	for (uint64_t i = model_any(4); i; i--)
		DO(cuMemAlloc_v2, (&address, (1 + model_any(6)) * PAGE));
	if (model_any(2))
		DO(cuMemAllocManaged, (&address, PAGE, CU_MEM_ATTACH_GLOBAL));
	if (model_any(2))
		DO(cuArrayCreate_v2, (&array, &about));
	DO(cuCtxDestroy_v2, (context));
	CHECK(real.cuCtxSetCurrent(model.context) == CUDA_SUCCESS);
}
