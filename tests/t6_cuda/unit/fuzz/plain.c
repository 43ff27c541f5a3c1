// SPDX-License-Identifier: Apache-2.0
/* Allocations: plain ones, pitched ones, and managed ones. */
#include "steps.h"

#include "calls.h"
#include "model.h"
#include "moves.h"
#include "pools.h"

/* Sizes of small ones, which share a chunk; of some that end within a chunk; and of some that fill chunks. */
static size_t any_bytes(void)
{
	switch (model_any(4)) {
	case 0:
		return 16 + 8 * model_any(8000);
	case 1:
		return PAGE / 2 + 8 * model_any(PAGE);
	default:
		return (1 + model_any(12)) * PAGE;
	}
}

void plain_alloc(void)
{
	struct plain *plain = model_free_plain();
	const size_t bytes = any_bytes();
	CUdeviceptr address;
	size_t pitch;

	if (!plain)
		return;
	*plain = (struct plain){ .bytes = bytes };
	switch (model_any(5)) {
	case 0:
		DO(cuMemAllocPitch_v2, (&address, &pitch, 1000, 1 + bytes / 1024, 4));
		CHECK(pitch == 1024);
		plain->bytes = pitch * (1 + bytes / 1024);
		break;
	case 1:
		DO(cuMemAllocManaged, (&address, bytes, CU_MEM_ATTACH_GLOBAL));
		plain->kind = MANAGED;
		break;
	default:
		DO(cuMemAlloc_v2, (&address, bytes));
	}
	plain->address = address;
}

void plain_free(void)
{
	struct plain *plain = model_plain();

	if (!plain)
		return;
	bound_freed(plain);
	if (plain->kind == PLAIN || plain->kind == MANAGED || !model_any(3))
		DO(cuMemFree_v2, (plain->address));
	else
		pools_free(plain);
	plain->address = 0;
}

/* Where no memory can go to the host, going over a limit is refused, by every call that takes GPU memory. */
void plain_refused(void)
{
	const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
					   .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	const CUDA_ARRAY_DESCRIPTOR about = { .Width = 1024, .Height = 2048, .Format = CU_AD_FORMAT_FLOAT,
					      .NumChannels = 1 };
	CUmemGenericAllocationHandle handle;
	CUdeviceptr address;
	CUarray array;

	moves_allow(false);
	double_swap(false);
	double_limit(0);
	switch (model_any(4)) {
	case 0:
		CALL(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate, (&handle, 4 * PAGE, &prop, 0));
		break;
	case 1:
		CALL(CUDA_ERROR_OUT_OF_MEMORY, cuArrayCreate_v2, (&array, &about));
		break;
	case 2:	/* memory that is kept, or was freed in streams, serves this */
		CALL(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2, (&address, model.device->resident + PAGE));
		break;
	default:
		CALL(CUDA_ERROR_OUT_OF_MEMORY, cuMemAllocAsync,
		     (&address, model.device->resident + PAGE, model.streams[0]));
	}
	double_limit(UINT64_MAX);
	double_swap(true);
	moves_allow(true);
}

void plain_end(void)
{
	for (struct plain *plain = model.plains; plain < model.plains + PLAINS; plain++)
		if (plain->address) {
			if (plain->kind == STREAMED || plain->kind == OWN || plain->kind == OF_POOL)
				pools_free(plain);
			else
				DO(cuMemFree_v2, (plain->address));
			plain->address = 0;
		}
}
