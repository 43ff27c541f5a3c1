// SPDX-License-Identifier: Apache-2.0
#include "binding.h"

#include <pthread.h>
#include <stdlib.h>

#include "driver.h"
#include "foreign.h"
#include "life.h"
#include "object.h"
#include "pages.h"
#include "region.h"
#include "tree.h"
#include "view.h"

struct binding {
	struct binding *next;
	uint64_t holder;
	CUcontext context;
	struct binding_box box;
	struct region *region;		/* the bound memory: the library's, or an object */
	struct foreign *memory;		/* or the driver's; neither: another process's */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct binding *bindings;

struct binding *binding_new(void)
{
	return calloc(1, sizeof(struct binding));
}

void binding_hold_object(struct binding *binding, struct region *object)
{
	pthread_mutex_lock(&tree_lock);
	object->bound++;
	binding->region = object;
	pthread_mutex_unlock(&tree_lock);
}

void binding_hold_handle(struct binding *binding, CUmemGenericAllocationHandle name)
{
	binding->memory = foreign_bind(name);
}

void binding_hold_address(struct binding *binding, CUdeviceptr address)
{
	struct region *region = NULL;
	const struct view *view;

	if (pages_near(address)) {
		pthread_mutex_lock(&tree_lock);
		view = view_at(address);
		region = view ? view->region : pages_region(address);
		if (region && region->freeing)
			region = NULL;
		if (region)
			region->bound++;
		pthread_mutex_unlock(&tree_lock);
	}
	binding->region = region;
	if (!region)
		binding->memory = foreign_bind_at(address);
}

int binding_ordinal(const struct binding *binding)
{
	const struct device *device = binding->region ? binding->region->device :
				      binding->memory ? foreign_device(binding->memory) : NULL;

	return device ? device->ordinal : -1;
}

void binding_enter(struct binding *binding, uint64_t holder, CUcontext context, const struct binding_box *box)
{
	if (!binding->region && !binding->memory) {
		free(binding);
		return;
	}
	binding->holder = holder;
	binding->context = context;
	binding->box = *box;
	pthread_mutex_lock(&lock);
	binding->next = bindings;
	bindings = binding;
	pthread_mutex_unlock(&lock);
}

void binding_drop(struct binding *binding)
{
	const CUstreamCaptureMode mode = driver_enter();

	if (binding->region)
		(binding->region->object ? object_unbind : region_unbind)(binding->region);
	if (binding->memory)
		foreign_unbind(binding->memory);
	driver_leave(mode);
	free(binding);
}

/* The bindings to end: those of a holder, within a box if there is one; or those of a context. */
struct unbound {
	uint64_t holder;
	const struct binding_box *box;
	CUcontext context;
};

/* Return whether two boxes meet along one side. Sides that a kind of box lacks, such as the height of a range of bytes,
 * are equal in both. */
static bool meets_along(const struct binding_box *one, const struct binding_box *other, int i)
{
	return (one->from[i] < other->to[i] && other->from[i] < one->to[i]) ||
	       (one->from[i] == other->from[i] && one->to[i] == other->to[i]);
}

static bool meets(const struct binding_box *one, const struct binding_box *other)
{
	return one->kind == other->kind && one->level == other->level && one->layer == other->layer &&
	       meets_along(one, other, 0) && meets_along(one, other, 1) && meets_along(one, other, 2);
}

/* Return what is common to two boxes that meet. */
static struct binding_box common(const struct binding_box *one, const struct binding_box *other)
{
	struct binding_box both = *one;

	for (int i = 0; i < 3; i++) {
		both.from[i] = one->from[i] > other->from[i] ? one->from[i] : other->from[i];
		both.to[i] = one->to[i] < other->to[i] ? one->to[i] : other->to[i];
	}
	return both;
}

/* Most boxes that the rest of a box makes beside one that it meets; none where nothing is left. */
#define BESIDE_MOST 6
static size_t beside(struct binding_box box, const struct binding_box *other, struct binding_box *rest)
{
	size_t count = 0;

	for (int i = 0; i < 3; i++) {
		if (box.from[i] < other->from[i]) {
			rest[count] = box;
			rest[count++].to[i] = box.from[i] = other->from[i];
		}
		if (box.to[i] > other->to[i]) {
			rest[count] = box;
			rest[count++].from[i] = box.to[i] = other->to[i];
		}
	}
	return count;
}

static bool is_unbound(const struct binding *binding, const struct unbound *unbound)
{
	if (unbound->context)
		return binding->context == unbound->context;
	return binding->holder == unbound->holder && (!unbound->box || meets(&binding->box, unbound->box));
}

bool binding_find(uint64_t holder, const struct binding_box *box, struct binding_box *found)
{
	const struct unbound unbound = { .holder = holder, .box = box };
	const struct binding *binding;

	pthread_mutex_lock(&lock);
	for (binding = bindings; binding && !is_unbound(binding, &unbound);)
		binding = binding->next;
	if (binding)
		*found = common(&binding->box, box);
	pthread_mutex_unlock(&lock);
	return binding;
}

/* Hold bound memory once more, for one more place. */
static void hold_again(const struct binding *binding)
{
	if (binding->region) {
		pthread_mutex_lock(&tree_lock);
		binding->region->bound++;
		pthread_mutex_unlock(&tree_lock);
	}
	if (binding->memory)
		foreign_bind_again(binding->memory);
}

/* Return new bindings for the parts of one that lie beside a box. Without memory for these, `whole` is set, and all of
 * it stays. */
static struct binding *keep_beside(const struct binding *binding, const struct binding_box *box, bool *whole)
{
	struct binding_box rest[BESIDE_MOST];
	struct binding *kept = NULL, *more;
	size_t count = beside(binding->box, box, rest);

	*whole = false;
	for (size_t i = 0; i < count && !*whole; i++) {
		more = malloc(sizeof(*more));
		*whole = !more;
		if (!more)
			continue;
		*more = *binding;
		more->box = rest[i];
		more->next = kept;
		kept = more;
	}
	while (*whole && (more = kept)) {
		kept = more->next;
		free(more);
	}
	for (more = kept; more; more = more->next)
		hold_again(more);
	return kept;
}

/* With the lock held. */
static void enter_all(struct binding *kept)
{
	for (struct binding *binding; (binding = kept);) {
		kept = binding->next;
		binding->next = bindings;
		bindings = binding;
	}
}

static struct binding *take(const struct unbound *unbound)
{
	struct binding *parts = NULL, *part;
	bool whole = false;

	struct binding *taken = NULL, *binding;

	pthread_mutex_lock(&lock);
	for (struct binding **at = &bindings; (binding = *at);) {
		if (!is_unbound(binding, unbound)) {
			at = &binding->next;
			continue;
		}
		part = unbound->box ? keep_beside(binding, unbound->box, &whole) : NULL;
		if (whole) {
			at = &binding->next;
			continue;
		}
		*at = binding->next;
		binding->next = taken;
		taken = binding;
		while (part) {
			struct binding *next = part->next;

			part->next = parts;
			parts = part;
			part = next;
		}
	}
	enter_all(parts);
	pthread_mutex_unlock(&lock);
	return taken;
}

static void clear(const struct unbound *unbound)
{
	binding_taken(take(unbound), true);
}

void binding_clear(uint64_t holder, const struct binding_box *box)
{
	clear(&(struct unbound){ .holder = holder, .box = box });
}

void binding_clear_all(uint64_t holder)
{
	clear(&(struct unbound){ .holder = holder });
}

struct binding *binding_take_all(uint64_t holder)
{
	return take(&(struct unbound){ .holder = holder });
}

void binding_taken(struct binding *taken, bool destroyed)
{
	for (struct binding *binding; (binding = taken);) {
		taken = binding->next;
		if (destroyed) {
			binding_drop(binding);
			continue;
		}
		pthread_mutex_lock(&lock);
		binding->next = bindings;
		bindings = binding;
		pthread_mutex_unlock(&lock);
	}
}

static void context_gone(struct device *device, CUcontext context)
{
	(void)device;
	clear(&(struct unbound){ .context = context });
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	bindings = NULL;
}

LIFE(.stage = LIFE_FOREIGN, .context_gone = context_gone, .forget = forget);
