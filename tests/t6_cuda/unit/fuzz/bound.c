// SPDX-License-Identifier: Apache-2.0
/* Multicast objects, and the memory that is bound to them: by its handle, or where it is. */
#include "steps.h"

#include "calls.h"
#include "model.h"

#define BINDINGS 8

static struct binding {
	struct thing *object;	/* NULL: none */
	size_t offset, pages;
	struct thing *thing;	/* what is bound; NULL: an allocation is */
	struct plain *plain;
} bindings[BINDINGS];

static bool is_object(const struct thing *thing)
{
	return thing->held && thing->multicast;
}

static bool can_be_bound(const struct thing *thing)
{
	return thing->held && !thing->multicast;
}

static bool is_whole_pages(const struct plain *plain)
{
	return plain->kind <= STREAMED && plain->bytes % PAGE == 0;
}

void bound_make(void)
{
	CUmulticastObjectProp prop = { .numDevices = GPUS, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
	struct thing *thing = model_free_thing();

	if (!thing || model_thing_that(is_object))
		return;
	*thing = (struct thing){ .pages = 4 + model_any(6), .multicast = true };
	prop.size = thing->pages * PAGE;
	DO(cuMulticastCreate, (&thing->name, &prop));
	thing->held = 1;
	model_named(thing);
	for (int gpu = 0; gpu < GPUS; gpu++)
		DO(cuMulticastAddDevice, (thing->name, gpu));
}

static size_t at_most(size_t pages, size_t most)
{
	return pages < most ? pages : most;
}

/* A part of a mapping, with all of which its memory stays. */
static bool bind_view(struct binding *binding)
{
	const struct seen *view = model_view();

	if (!view || !can_be_bound(view->thing))
		return false;
	binding->pages = at_most(binding->pages, view->pages);
	DO(cuMulticastBindAddr, (binding->object->name, binding->offset * PAGE,
				 model_address(view->start + model_any(view->pages - binding->pages + 1)), binding->pages * PAGE, 0));
	binding->thing = view->thing;
	return true;
}

/* All of an allocation. */
static bool bind_plain(struct binding *binding)
{
	struct plain *plain = model_plain_that(is_whole_pages);

	if (!plain || plain->bytes > binding->pages * PAGE)
		return false;
	binding->pages = plain->bytes / PAGE;
	DO(cuMulticastBindAddr, (binding->object->name, binding->offset * PAGE, plain->address, plain->bytes, 0));
	binding->plain = plain;
	return true;
}

static bool bind_handle(struct binding *binding)
{
	struct thing *thing = model_thing_that(can_be_bound);

	if (!thing)
		return false;
	binding->pages = at_most(binding->pages, thing->pages);
	DO(cuMulticastBindMem, (binding->object->name, binding->offset * PAGE, thing->name,
				model_any(thing->pages - binding->pages + 1) * PAGE, binding->pages * PAGE, 0));
	binding->thing = thing;
	return true;
}

static struct binding *free_binding(const struct thing *object, size_t offset)
{
	struct binding *found = NULL;

	for (struct binding *binding = bindings; binding < bindings + BINDINGS; binding++) {
		if (binding->object == object && binding->offset == offset)
			return NULL;
		if (!binding->object)
			found = binding;
	}
	return found;
}

void bound_bind(void)
{
	static bool (*const ways[])(struct binding *) = { bind_view, bind_plain, bind_handle };
	struct thing *object = model_thing_that(is_object);
	const size_t offset = object ? model_any(object->pages) : 0;
	struct binding *binding = object ? free_binding(object, offset) : NULL;

	if (!binding)
		return;
	*binding = (struct binding){ .object = object, .offset = offset, .pages = 1 + model_any(object->pages - offset) };
	if (!ways[model_any(3)](binding)) {
		binding->object = NULL;
		return;
	}
	object->bound++;
	if (binding->thing) {
		binding->thing->bound++;
		binding->thing->stays = true;
	} else {
		binding->plain->bound++;
		binding->plain->stays = true;
	}
}

static void unbind(struct binding *binding)
{
	DO(cuMulticastUnbind, (binding->object->name, 0, binding->offset * PAGE, binding->pages * PAGE));
	binding->object->bound--;
	if (binding->thing)
		binding->thing->bound--;
	else
		binding->plain->bound--;
	binding->object = NULL;
}

void bound_unbind(void)
{
	for (size_t i = 0, first = model_any(BINDINGS); i < BINDINGS; i++) {
		struct binding *binding = &bindings[(first + i) % BINDINGS];

		if (!binding->object)
			continue;
		unbind(binding);
		return;
	}
}

void bound_end(void)
{
	for (struct binding *binding = bindings; binding < bindings + BINDINGS; binding++)
		if (binding->object)
			unbind(binding);
}
