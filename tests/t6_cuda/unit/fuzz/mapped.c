// SPDX-License-Identifier: Apache-2.0
/* Mappings of physical memory, and the GPUs that have access to them. */
#include "steps.h"

#include "calls.h"
#include "model.h"

void mapped_map(void)
{
	struct thing *thing = model_thing();
	const size_t start = model_any(ARENA);
	struct seen view = { .thing = thing, .start = start };

	if (!thing)
		return;
	view.offset = model_any(3) ? 0 : model_any(thing->pages);
	view.pages = model_any(3) ? thing->pages - view.offset : 1 + model_any(thing->pages - view.offset);
	for (size_t i = 0; i < view.pages; i++)
		if (start + i >= ARENA || model.at_page[start + i])
			return;
	DO(cuMemMap, (model_address(start), view.pages * PAGE, view.offset * PAGE, thing->name, 0));
	model.views[start] = view;
	thing->seen++;
	for (size_t i = 0; i < view.pages; i++)
		model.at_page[start + i] = &model.views[start];
}

static void gone(size_t page)
{
	struct seen *view = &model.views[page];
	struct thing *thing = view->thing;

	if (model.at_page[page] == view) {
		view->thing = NULL;
		thing->seen--;
		model_settle(thing);
	}
	model.at_page[page] = NULL;
}

void mapped_unmap(void)
{
	struct seen *view = model_view();
	size_t pages;

	if (!view)
		return;
	if (view->pages > 1 && !view->thing->by_driver && !view->thing->multicast && !model_any(4)) {	/* in part */
		CALL(CUDA_ERROR_INVALID_VALUE, cuMemUnmap, (model_address(view->start), PAGE));
		return;
	}
	pages = model_span(view);
	DO(cuMemUnmap, (model_address(view->start), pages * PAGE));
	for (size_t i = view->start, end = i + pages; i < end; i++)
		gone(i);
}

void mapped_allow(void)
{
	static const CUmemAccess_flags kinds[] = { CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READ,
						   CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
						   CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemAccessDesc access[GPUS + 1] = {
		{ .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE }, .flags = kinds[model_any(4)] },
		{ .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 }, .flags = kinds[model_any(4)] },
		{ .location = { .type = CU_MEM_LOCATION_TYPE_HOST }, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE },
	};
	struct seen *view = model_view();
	const bool to_host = !model_any(24);
	size_t pages, gpus = 1 + model_any(GPUS);

	if (!view)
		return;
	pages = model_span(view);
	if (to_host)
		gpus = GPUS;
	DO(cuMemSetAccess, (model_address(view->start), pages * PAGE, access, gpus + to_host));
	for (size_t i = view->start; i < view->start + pages; i++) {
		for (size_t gpu = 0; gpu < gpus; gpu++)
			model.at_page[i]->flags[gpu] = access[gpu].flags;
		model.at_page[i]->thing->stays |= to_host;
	}
}

/* Reserve addresses at which nothing is mapped. */
void mapped_reserve(void)
{
	const size_t bytes = (1 + model_any(8)) * PAGE;
	CUdeviceptr address;

	DO(cuMemAddressReserve, (&address, bytes, 0, 0, 0));
	DO(cuMemAddressFree, (address, bytes));
}

void mapped_end(void)
{
	for (size_t i = 0; i < ARENA; i++)
		if (model.views[i].thing) {
			const size_t end = i + model.views[i].pages;

			DO(cuMemUnmap, (model_address(i), model.views[i].pages * PAGE));
			for (size_t page = i; page < end; page++)
				gone(page);
		}
}
