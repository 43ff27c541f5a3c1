// SPDX-License-Identifier: Apache-2.0
/* Multicast objects, and memory that is bound to them, by its handle or by its address. */
#include "steps.h"

#include "calls.h"
#include "model.h"

#define BINDINGS 8

static struct binding {
	struct thing *object;	/* NULL: none */
	size_t offset, pages;
	struct thing *thing;	/* the bound memory; NULL: an allocation */
	struct plain *plain;	/* the bound allocation; NULL: freed */
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
	return plain->kind <= OWN && plain->bytes % PAGE == 0;
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

/* Bind a part of a mapping: all of its memory stays on the GPU. */
static bool bind_view(struct binding *binding)
{
	const struct seen *view = model_view();

	if (!view || view->thing->multicast)
		return false;
	binding->pages = at_most(binding->pages, view->pages);
	DO(cuMulticastBindAddr,
	   (binding->object->name, binding->offset * PAGE,
	    model_address(view->start + model_any(view->pages - binding->pages + 1)), binding->pages * PAGE, 0));
	binding->thing = view->thing;
	return true;
}

/* Bind a whole allocation. */
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

/* Return the pages from there on to which nothing is bound. */
static size_t room(const struct thing *object, size_t offset)
{
	size_t pages = object->pages - offset;

	for (const struct binding *binding = bindings; binding < bindings + BINDINGS; binding++) {
		if (binding->object != object || binding->offset + binding->pages <= offset)
			continue;
		pages = binding->offset <= offset ? 0 : at_most(binding->offset - offset, pages);
	}
	return pages;
}

static struct binding *free_binding(void)
{
	for (struct binding *binding = bindings; binding < bindings + BINDINGS; binding++)
		if (!binding->object)
			return binding;
	return NULL;
}

void bound_bind(void)
{
	static bool (*const ways[])(struct binding *) = { bind_view, bind_plain, bind_handle };
	struct thing *object = model_thing_that(is_object);
	const size_t offset = object ? model_any(object->pages) : 0, pages = object ? room(object, offset) : 0;
	struct binding *binding = free_binding();

	if (!binding || !pages)
		return;
	*binding = (struct binding){ .object = object, .offset = offset, .pages = 1 + model_any(pages) };
	if (!ways[model_any(3)](binding)) {
		binding->object = NULL;
		return;
	}
	if (binding->thing) {
		binding->thing->bound++;
		binding->thing->stays = true;
	} else {
		binding->plain->stays = true;
	}
}

static void unbound(struct binding *binding)
{
	struct thing *thing = binding->thing;

	binding->object = NULL;
	if (!thing)
		return;
	thing->bound--;
	model_settle(thing);
}

static void unbind(struct binding *binding)
{
	DO(cuMulticastUnbind, (binding->object->name, 0, binding->offset * PAGE, binding->pages * PAGE));
	unbound(binding);
}

void bound_unbind(void)
{
	for (size_t i = 0, first = model_any(BINDINGS); i < BINDINGS; i++) {
		struct binding *binding = &bindings[(first + i) % BINDINGS];

		if (!binding->object || !binding->object->held)
			continue;
		unbind(binding);
		return;
	}
}

/* Forget the bindings of an object that is gone. */
void bound_gone(const struct thing *object)
{
	for (struct binding *binding = bindings; binding < bindings + BINDINGS; binding++)
		if (binding->object == object)
			unbound(binding);
}

/* Note that an allocation was freed; its memory stays bound. */
void bound_freed(const struct plain *plain)
{
	for (struct binding *binding = bindings; binding < bindings + BINDINGS; binding++)
		if (binding->plain == plain)
			binding->plain = NULL;
}

void bound_end(void)
{
	for (struct binding *binding = bindings; binding < bindings + BINDINGS; binding++)
		if (binding->object && binding->object->held)
			unbind(binding);
}
