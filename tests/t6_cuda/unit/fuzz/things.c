// SPDX-License-Identifier: Apache-2.0
/* The program's own physical memory: made, held by handles, exported and imported, and released. */
#include "steps.h"

#include <fcntl.h>
#include <unistd.h>

#include "calls.h"
#include "model.h"

#define KEPT 4
static int kept[KEPT];	/* descriptor + 1; 0: none */

static struct contents *new_contents(void)
{
	struct contents *contents = calloc(1, sizeof(*contents));

	CHECK(contents);
	contents->users = 1;
	return contents;
}

void things_make(void)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	struct thing *thing = model_free_thing();

	if (!thing)
		return;
	*thing = (struct thing){ .pages = 1 + model_any(model_any(4) ? 5 : PAGES_MOST), .exportable = !model_any(4) };
	if (thing->exportable)
		prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	prop.allocFlags.gpuDirectRDMACapable = model_any(2);
	switch (model_any(10)) {	/* properties that never change */
	case 0:
		prop.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_GENERIC;
		thing->by_driver = true;
		break;
	case 1:
		prop.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL;
		thing->by_driver = true;
		break;
	}
	DO(cuMemCreate, (&thing->name, thing->pages * PAGE, &prop, 0));
	thing->held = 1;
	thing->contents = new_contents();
	model_named(thing);
}

void things_release(void)
{
	struct thing *thing = model_thing();

	if (!thing)
		return;
	DO(cuMemRelease, (thing->name));
	thing->held--;
	model_settle(thing);
}

void things_retain(void)
{
	const struct seen *view = model_view();
	CUmemGenericAllocationHandle name;

	if (!view)
		return;
	DO(cuMemRetainAllocationHandle, (&name, (void *)(model_address(view->start) + model_any(view->pages * PAGE))));
	CHECK(name == view->thing->name);
	view->thing->held++;
}

/* Import memory while it lives: later, the double would count it as another process's, and the library would not. */
static void import(struct thing *of, int fd)
{
	struct thing *thing = model_free_thing();

	if (!thing)
		return;
	*thing = (struct thing){ .pages = of->pages, .by_driver = true, .contents = of->contents };
	DO(cuMemImportFromShareableHandle,
	   (&thing->name, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	thing->held = 1;
	thing->contents->users++;
	/* The driver exports it no more, and only knows the first one's properties: nothing else is checked. */
	model_named(thing);
}

void things_keep(int fd)
{
	for (size_t i = 0; i < KEPT && model_any(4); i++)
		if (!kept[i]) {
			/* Under another number, as in another process. */
			kept[i] = 1 + fcntl(fd, F_DUPFD_CLOEXEC, 100);
			break;
		}
	close(fd);
}

static bool is_exportable(const struct thing *thing)
{
	return thing->held && thing->exportable;
}

void things_export(void)
{
	struct thing *thing = model_thing_that(is_exportable);
	int fd = -1;

	if (!thing)
		return;
	DO(cuMemExportToShareableHandle, (&fd, thing->name, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	CHECK(fd >= 0);
	thing->stays = true;
	if (model_any(2))
		import(thing, fd);
	things_keep(fd);
}

/* Close descriptors of memory that may be gone, as another process could have them. */
void things_close(void)
{
	for (size_t i = 0, first = model_any(KEPT); i < KEPT; i++) {
		int *fd = &kept[(first + i) % KEPT];

		if (!*fd)
			continue;
		close(*fd - 1);
		*fd = 0;
		return;
	}
}

/* Release all that is left, at the end. */
void things_end(void)
{
	for (struct thing *thing = model.things; thing < model.things + THINGS; thing++)
		while (thing->held) {
			DO(cuMemRelease, (thing->name));
			thing->held--;
			model_settle(thing);
		}
	double_agree(model.device);
	for (size_t i = 0; i < KEPT; i++)
		things_close();
}
