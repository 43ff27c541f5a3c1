// SPDX-License-Identifier: Apache-2.0
/*
 * Finds the pointers and tensor maps among a kernel's parameters.
 *
 * The layout of a function's parameters is looked up on every launch, so this takes no lock: layouts are in a table of
 * pointers that is replaced when it is full, and a layout is never freed while a thread may read it. When a function is
 * unloaded, another may get its handle, so each layout has the epoch in which it was learnt.
 */

#include "heat.h"

#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "life.h"
#include "map.h"
#include "ours.h"
#include "pages.h"
#include "tensor.h"

#define WORD sizeof(CUdeviceptr)
/* A kernel has at most 32764 bytes of parameters (CUDA 12.1). */
#define MOST_BYTES 32764

struct layout {
	CUfunction function;
	uint64_t epoch;		/* atomically */
	size_t count;
	struct { uint32_t offset, size; } parameter[];
};

struct table {
	size_t size, used;
	struct layout *layouts[];	/* atomically */
};

bool heat_wanted;
static unsigned int reasons;	/* bits of enum heat_reason */

static struct table *table;	/* atomically; written under `lock` */
static uint64_t epoch = 1;	/* atomically */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* A CUkernel may be launched in place of a CUfunction, but the driver has another call to ask about it. Maps it to its
 * library. */
static struct map kernels;	/* under `lock` */
static int unloading;		/* under `lock`: while code is unloaded, nothing is learnt */

static size_t start(const struct table *in, CUfunction function)
{
	return ((uintptr_t)function * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (in->size - 1);
}

static struct layout *find(struct table *in, CUfunction function)
{
	struct layout *layout;

	if (!in)
		return NULL;
	for (size_t i = start(in, function); (layout = __atomic_load_n(&in->layouts[i], __ATOMIC_ACQUIRE));
	     i = (i + 1) & (in->size - 1))
		if (layout->function == function)
			return layout;
	return NULL;
}

static CUresult ask(CUfunction function, bool kernel, size_t index, size_t *offset, size_t *size)
{
	if (kernel)
		return real.cuKernelGetParamInfo ?
			       real.cuKernelGetParamInfo((CUkernel)function, index, offset, size) :
			       CUDA_ERROR_NOT_SUPPORTED;
	return real.cuFuncGetParamInfo ? real.cuFuncGetParamInfo(function, index, offset, size) :
					 CUDA_ERROR_NOT_SUPPORTED;
}

/* Asks the driver. An older driver does not answer; the function then counts as one without parameters, whose memory is
 * not hot. */
static struct layout *learn(CUfunction function, bool kernel, uint64_t now)
{
	size_t offset, size, most = 16, count = 0;
	struct layout *layout = malloc(sizeof(*layout) + most * sizeof(layout->parameter[0])), *bigger;

	while (layout && !ask(function, kernel, count, &offset, &size) && offset + size <= MOST_BYTES) {
		if (count == most) {
			most *= 2;
			bigger = realloc(layout, sizeof(*layout) + most * sizeof(layout->parameter[0]));
			if (!bigger) {
				free(layout);
				return NULL;
			}
			layout = bigger;
		}
		layout->parameter[count].offset = (uint32_t)offset;
		layout->parameter[count].size = (uint32_t)size;
		count++;
	}
	if (!layout)
		return NULL;
	layout->function = function;
	layout->epoch = now;
	layout->count = count;
	return layout;
}

static void insert(struct table *into, struct layout *layout)
{
	size_t i = start(into, layout->function);

	while (into->layouts[i] && into->layouts[i]->function != layout->function)
		i = (i + 1) & (into->size - 1);
	if (!into->layouts[i])
		into->used++;
	__atomic_store_n(&into->layouts[i], layout, __ATOMIC_RELEASE);
}

/* The old table is kept, since a thread may be reading it. All old tables together are as large as the last. */
static bool grow(void)
{
	size_t size = table ? table->size * 2 : 256;
	struct table *bigger = calloc(1, sizeof(*bigger) + size * sizeof(bigger->layouts[0]));

	if (!bigger)
		return false;
	bigger->size = size;
	for (size_t i = 0; table && i < table->size; i++)
		if (table->layouts[i])
			insert(bigger, table->layouts[i]);
	__atomic_store_n(&table, bigger, __ATOMIC_RELEASE);
	return true;
}

static bool equal(const struct layout *a, const struct layout *b)
{
	return a->count == b->count && !memcmp(a->parameter, b->parameter, a->count * sizeof(a->parameter[0]));
}

/* With `lock` held. */
static struct layout *learn_and_keep(CUfunction function)
{
	uint64_t now = __atomic_load_n(&epoch, __ATOMIC_ACQUIRE);
	struct layout *old = find(table, function);
	struct layout *layout;

	if (old && __atomic_load_n(&old->epoch, __ATOMIC_ACQUIRE) == now)
		return old;
	layout = learn(function, map_get(&kernels, function) != NULL, now);
	if (!layout)
		return NULL;
	if (old && equal(old, layout)) {
		free(layout);
		__atomic_store_n(&old->epoch, now, __ATOMIC_RELEASE);
		return old;
	}
	if ((!table || table->used * 2 >= table->size) && !grow()) {
		free(layout);
		return NULL;
	}
	/* The old layout is leaked: a thread may be reading it. */
	insert(table, layout);
	return layout;
}

static const struct layout *layout_of(CUfunction function)
{
	struct layout *layout = find(__atomic_load_n(&table, __ATOMIC_ACQUIRE), function);

	if (layout && __atomic_load_n(&layout->epoch, __ATOMIC_ACQUIRE) == __atomic_load_n(&epoch, __ATOMIC_ACQUIRE))
		return layout;
	pthread_mutex_lock(&lock);
	layout = unloading ? NULL : learn_and_keep(function);
	pthread_mutex_unlock(&lock);
	return layout;
}

/* Visits structures, too: a pointer lies at a multiple of 8 in a structure, and a structure does among the parameters,
 * which begin `offset` bytes before `bytes`. A map may be part of one. */
static void visit_words(const char *bytes, size_t size, size_t offset, heat_visit *visit, void *argument)
{
	const bool maps = __atomic_load_n(&tensor_any, __ATOMIC_RELAXED);
	CUdeviceptr word;
	size_t described;

	/* Start at the first word that is aligned where the kernel will find it. */
	for (size_t i = (WORD - offset % WORD) % WORD; i + WORD <= size; i += WORD) {
		if (maps && (offset + i) % TENSOR_ALIGNMENT == 0 && i + sizeof(CUtensorMap) <= size &&
		    tensor_find(bytes + i, &word, &described)) {
			visit(word, described, argument);
			i += sizeof(CUtensorMap) - WORD;
			continue;
		}
		memcpy(&word, bytes + i, WORD);
		if (word)
			visit(word, 0, argument);
	}
}

static void visit_extra(void **extra, heat_visit *visit, void *argument)
{
	const char *buffer = NULL;
	size_t size = 0;

	for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
		if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
			buffer = extra[i + 1];
		else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
			size = extra[i + 1] ? *(const size_t *)extra[i + 1] : 0;
		else
			return; /* the driver refuses this */
	}
	if (buffer && size <= MOST_BYTES)
		visit_words(buffer, size, 0, visit, argument);
}

void heat_words(CUfunction function, void **parameters, void **extra, heat_visit *visit, void *argument)
{
	const struct layout *layout;

	if (!parameters) {
		if (extra)
			visit_extra(extra, visit, argument);
		return;
	}
	layout = function ? layout_of(function) : NULL;
	for (size_t i = 0; layout && i < layout->count; i++) {
		const size_t size = layout->parameter[i].size;

		if (size >= WORD && parameters[i])
			visit_words(parameters[i], size, layout->parameter[i].offset, visit, argument);
	}
}

void heat_use(CUdeviceptr address, size_t bytes)
{
	if (bytes)
		pages_use(address, bytes);
	else
		pages_use_from(address);
}

static void use(CUdeviceptr address, size_t bytes, void *unused)
{
	(void)unused;
	heat_use(address, bytes);
}

void heat_want(enum heat_reason reason, bool wanted)
{
	reasons = wanted ? reasons | 1u << reason : reasons & ~(1u << reason);
	if (heat_is_wanted() != (reasons != 0))
		__atomic_store_n(&heat_wanted, reasons != 0, __ATOMIC_RELAXED);
}

bool heat_is_wanted_for(enum heat_reason reason)
{
	return reasons & 1u << reason;
}

void heat_launch(CUfunction function, void **parameters, void **extra)
{
	ours_enter();
	heat_words(function, parameters, extra, use, NULL);
	ours_leave();
}

void heat_touch(CUdeviceptr pointer, size_t bytes)
{
	if (heat_is_wanted())
		pages_use(pointer, bytes);
}

void heat_code_goes(void)
{
	pthread_mutex_lock(&lock);
	unloading++;
	__atomic_add_fetch(&epoch, 1, __ATOMIC_ACQ_REL);
	pthread_mutex_unlock(&lock);
}

void heat_code_gone(void)
{
	pthread_mutex_lock(&lock);
	unloading--;
	__atomic_add_fetch(&epoch, 1, __ATOMIC_ACQ_REL);
	pthread_mutex_unlock(&lock);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	kernels = (struct map){ 0 };
	unloading = 0;
	table = NULL;
	heat_wanted = false;
	reasons = 0;
}

/* Which handles are those of kernels, not of functions */

void heat_kernels(const CUkernel *handles, size_t count, CUlibrary library)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count; i++)
		if (handles[i])
			map_put(&kernels, handles[i], library);
	pthread_mutex_unlock(&lock);
}

void heat_library_gone(CUlibrary library)
{
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < kernels.size; i++)
		if (kernels.slots[i].value == library)
			map_take(&kernels, kernels.slots[i].key);
	pthread_mutex_unlock(&lock);
}

LIFE(.stage = LIFE_MOVES, .forget = forget);
