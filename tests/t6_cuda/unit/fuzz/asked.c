// SPDX-License-Identifier: Apache-2.0
/* Queries about memory, whose answers do not depend on where it is. */
#include "steps.h"

#include "calls.h"
#include "model.h"

void asked_physical(void)
{
	const struct thing *thing = model_thing();
	const struct seen *view = model_view();
	const int gpu = (int)model_any(GPUS);
	const CUmemLocation location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gpu };
	unsigned long long flags = ~0ULL;
	CUmemAllocationProp prop;

	if (thing) {
		DO(cuMemGetAllocationPropertiesFromHandle, (&prop, thing->name));
		/* An imported handle reports the properties of the first one. */
		CHECK(!thing->exportable || prop.requestedHandleTypes);
		CHECK(prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE);
	}
	if (view) {
		DO(cuMemGetAccess, (&flags, &location, model_address(view->start) + model_any(view->pages * PAGE)));
		CHECK(flags == view->flags[gpu]);
	}
}

/*
 * Query an address of the `bytes` from `start` on; `base` and `size` are the range that the program has reserved there.
 */
static void ask(CUdeviceptr start, size_t bytes, CUdeviceptr base, size_t size)
{
	CUpointer_attribute kinds[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
					CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE };
	const CUdeviceptr at = start + model_any(bytes);
	CUdeviceptr begins = 0, range = 0, pointer = 0;
	size_t length = 0, whole = 0;
	unsigned int type = 0;
	int ordinal = -1;
	void *data[] = { &type, &ordinal, &range, &whole };

	DO(cuMemGetAddressRange_v2, (&begins, &length, at));
	CHECK(begins == start && length == bytes);
	DO(cuPointerGetAttributes, (4, kinds, data, at));
	CHECK(type == CU_MEMORYTYPE_DEVICE && ordinal == 0 && range == base && whole == size);
	DO(cuPointerGetAttribute, (&pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at));
	CHECK(pointer == at);
	whole = 0;
	DO(cuPointerGetAttribute, (&whole, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at));
	CHECK(whole == size);
}

void asked_address(void)
{
	const struct seen *view = model_any(2) ? model_view() : NULL;
	const struct plain *plain = model_plain();

	if (view && !view->thing->multicast)
		ask(model_address(view->start), view->pages * PAGE, model.arena, ARENA * PAGE);
	else if (plain)
		ask(plain->address, plain->bytes, plain->address, plain->bytes);
}

void asked_amounts(void)
{
	size_t left = 0, all = 0, total = 0;
	unsigned int few = 0, sum = 0;

	DO(cuMemGetInfo_v2, (&left, &all));
	CHECK(left <= all);
	DO(cuMemGetInfo, (&few, &sum));
	CHECK(few <= sum);
	DO(cuDeviceTotalMem_v2, (&total, 0));
	CHECK(total);
	DO(cuDeviceTotalMem, (&sum, 0));
	CHECK(sum);	/* the limit may have changed meanwhile */
}
