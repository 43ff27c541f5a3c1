// SPDX-License-Identifier: Apache-2.0
/* Addresses that are handed out of the process: by a descriptor for other drivers, and by an attribute. */
#include "steps.h"

#include "calls.h"
#include "model.h"

static void name(CUdeviceptr address, size_t bytes)
{
	int fd = -1;

	DO(cuMemGetHandleForAddressRange, (&fd, address, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
	CHECK(fd >= 0);
	things_keep(fd);
}

static bool is_whole_pages(const struct plain *plain)
{
	return plain->kind <= OWN && plain->bytes % PAGE == 0;
}

void shares_name(void)
{
	const struct seen *view = model_any(2) ? model_view() : NULL;
	struct plain *plain = model_plain_that(is_whole_pages);
	size_t page;

	if (view && !view->thing->multicast) {
		page = model_any(view->pages);
		name(model_address(view->start + page), (1 + model_any(view->pages - page)) * PAGE);
		view->thing->stays = true;
	} else if (plain) {
		name(plain->address, plain->bytes);
		plain->stays = true;
	}
}

void shares_set(void)
{
	const struct seen *view = model_any(2) ? model_view() : NULL;
	const struct plain *plain = model_plain();
	const unsigned int yes = 1;

	if (view && !view->thing->multicast) {
		DO(cuPointerSetAttribute, (&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
					   model_address(view->start) + model_any(view->pages * PAGE)));
		view->thing->stays = true;
	} else if (plain) {
		DO(cuPointerSetAttribute, (&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain->address));
	}
}
