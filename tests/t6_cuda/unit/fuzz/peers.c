// SPDX-License-Identifier: Apache-2.0
/* Access of another GPU to all allocations. */
#include "steps.h"

#include <dlfcn.h>

#include "calls.h"
#include "model.h"
#include "moves.h"
#include "pools.h"

static bool for_the_other(CUdeviceptr address)
{
	static bool (*ask)(CUdeviceptr, CUdevice);

	if (!ask)
		ask = driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_memory_accessible");
	return ask(address, 1);
}

/* Check access, except where the driver had to allocate itself. What a move has mapped has its access a moment
 * later. */
static void check(void)
{
	moves_rest();
	for (const struct plain *plain = model.plains; plain < model.plains + PLAINS; plain++)
		for (size_t at = 0; plain->address && plain->kind <= OWN && at < plain->bytes; at += PAGE)
			CHECK(for_the_other(plain->address + at) || model_place(plain->address + at) < 0);
}

void peers_start(void)
{
	CHECK(real.cuCtxSetCurrent(model.other) == CUDA_SUCCESS);
	CHECK(device_current() && device_current() != model.device);
	CHECK(real.cuCtxSetCurrent(model.context) == CUDA_SUCCESS);
}

static void by_context(void)
{
	CHECK(real.cuCtxSetCurrent(model.other) == CUDA_SUCCESS);
	DO(cuCtxEnablePeerAccess, (model.context, 0));
	CHECK(real.cuCtxSetCurrent(model.context) == CUDA_SUCCESS);
}

static void by_pool(void)
{
	const CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 },
					 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	DO(cuMemPoolSetAccess, (pools_default(), &access, 1));
}

void peers_give(void)
{
	if (model_any(2))
		by_context();
	else
		by_pool();
	check();
}

/* End the access of new allocations; existing ones keep it. */
void peers_end(void)
{
	for (int i = 0; i < 3; i++) {
		by_context();
		check();
		CHECK(real.cuCtxSetCurrent(model.other) == CUDA_SUCCESS);
		DO(cuCtxDisablePeerAccess, (model.context));
		CHECK(real.cuCtxSetCurrent(model.context) == CUDA_SUCCESS);
		check();
	}
}
