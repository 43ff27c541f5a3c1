// SPDX-License-Identifier: Apache-2.0
#include "foreign.h"

#include "daemon.h"
#include "lent.h"
#include "life.h"
#include "table.h"

#include <stdlib.h>

/* Longest distance from an address back to the start of its mapping, in GG_CHUNKs: 256 GiB. */
#define MAPPING_PAGES (1 << 17)

/* One allocation, handle or mapping of the driver's. */
struct foreign {
	struct device *device;
	uint64_t bytes;
	CUcontext context;
	bool managed;
	unsigned int references;	/* to physical memory: by its handle, mappings and bindings */
	unsigned int named;		/* those by its handle */
	uint64_t mapped;		/* bytes of this mapping */
	struct foreign *memory;		/* memory behind a mapping */
	CUdeviceptr address;		/* start of a mapping */
	struct foreign *next;		/* next of the mappings being removed */
	uint64_t multicast;		/* number of a multicast object, which has no memory of its own; 0: none */
	bool exported;			/* other processes may have it */
	bool import;			/* import of the program's own, charged memory: only a name (`lent`) */
	uint64_t lent;			/* its name in lent.h; 0: no descriptor of it was given out */
	void (*gone)(uint64_t multicast);
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct table allocations;	/* by address, or by handle of an array */
static struct table handles;		/* physical memory, by handle */
static struct table mappings;		/* by address */
/* Bytes on each device, by its ordinal: exact ones, and those charged, which are rounded up. */
static uint64_t exact[GG_ORDINALS], charged[GG_ORDINALS], managed[GG_ORDINALS];

static uint64_t numbers;		/* names given to lent.c so far */

static uint64_t round_up(uint64_t bytes)
{
	return (bytes + GG_CHUNK - 1) & ~(GG_CHUNK - 1);
}

CUresult foreign_charge(struct device *device, uint64_t bytes)
{
	uint64_t need;

	if (!device)
		return CUDA_SUCCESS;
	pthread_mutex_lock(&lock);
	exact[device->ordinal] += bytes;
	need = round_up(exact[device->ordinal]);
	need = need > charged[device->ordinal] ? need - charged[device->ordinal] : 0;
	charged[device->ordinal] += need;
	pthread_mutex_unlock(&lock);
	if (!need)
		return CUDA_SUCCESS;
	if (daemon_charge(device, need)) {
		pthread_mutex_lock(&lock);
		exact[device->ordinal] -= bytes;
		charged[device->ordinal] -= need;
		pthread_mutex_unlock(&lock);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	__atomic_add_fetch(&device->resident, need, __ATOMIC_RELAXED);
	__atomic_add_fetch(&device->foreign, need, __ATOMIC_RELAXED);
	daemon_report(device);
	return CUDA_SUCCESS;
}

/* lent.c charges `bytes` from now on, in chunks as here. */
static void hand_over(struct device *device, uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	exact[device->ordinal] -= bytes;
	charged[device->ordinal] -= bytes;
	pthread_mutex_unlock(&lock);
	__atomic_sub_fetch(&device->foreign, bytes, __ATOMIC_RELAXED);
	daemon_report(device);
}

void foreign_uncharge(struct device *device, uint64_t bytes)
{
	uint64_t keep, less;

	if (!device)
		return;
	pthread_mutex_lock(&lock);
	exact[device->ordinal] -= bytes;
	keep = round_up(exact[device->ordinal]);
	less = charged[device->ordinal] > keep ? charged[device->ordinal] - keep : 0;
	charged[device->ordinal] -= less;
	pthread_mutex_unlock(&lock);
	if (!less)
		return;
	__atomic_sub_fetch(&device->resident, less, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&device->foreign, less, __ATOMIC_RELAXED);
	daemon_uncharge(device, less, 0);
	daemon_report(device);
}

/* Adds to, or takes from, the managed bytes. */
static void name(struct device *device, uint64_t bytes, bool more)
{
	uint64_t before, after;

	pthread_mutex_lock(&lock);
	before = round_up(managed[device->ordinal]);
	managed[device->ordinal] += more ? bytes : -bytes;
	after = round_up(managed[device->ordinal]);
	pthread_mutex_unlock(&lock);
	if (before == after)
		return;
	__atomic_add_fetch(&device->foreign, after - before, __ATOMIC_RELAXED);
	daemon_report(device);
}

static void drop(struct foreign *foreign)
{
	if (foreign->multicast) {
		if (!foreign->exported)
			foreign->gone(foreign->multicast);
	} else if (foreign->import)
		lent_import_over(foreign->lent);
	else if (foreign->managed)
		name(foreign->device, foreign->bytes, false);
	else if (foreign->lent && foreign->bytes % GG_CHUNK == 0 &&
		 lent_keep(foreign->device, foreign->lent, foreign->bytes))
		hand_over(foreign->device, foreign->bytes);
	else
		foreign_uncharge(foreign->device, foreign->bytes);
	free(foreign);
}

static void add(struct device *device, uint64_t key, uint64_t bytes, CUcontext context,
		bool is_managed)
{
	struct foreign *foreign = device ? calloc(1, sizeof(*foreign)) : NULL, *before;
	bool added;

	if (!foreign)
		return;	/* stays charged until the process ends */
	*foreign = (struct foreign){
		.device = device, .bytes = bytes, .context = context, .managed = is_managed,
	};
	pthread_mutex_lock(&lock);
	/* The old entry went with a context whose end was not seen here; the driver has given its address out again. */
	before = table_take(&allocations, key);
	added = table_put(&allocations, key, foreign);
	pthread_mutex_unlock(&lock);
	if (before)
		drop(before);
	if (!added)
		free(foreign);
	else if (is_managed)
		name(device, bytes, true);
}

void foreign_is(struct device *device, uint64_t key, uint64_t bytes, CUcontext context)
{
	add(device, key, bytes, context, false);
}

void foreign_is_managed(struct device *device, uint64_t key, uint64_t bytes, CUcontext context)
{
	add(device, key, bytes, context, true);
}

struct foreign *foreign_take(uint64_t key)
{
	struct foreign *foreign;

	pthread_mutex_lock(&lock);
	foreign = table_take(&allocations, key);
	pthread_mutex_unlock(&lock);
	return foreign;
}

void foreign_taken(struct foreign *taken, uint64_t key, bool freed)
{
	if (!taken)
		return;
	if (freed) {
		drop(taken);
		return;
	}
	pthread_mutex_lock(&lock);
	if (!table_put(&allocations, key, taken))
		free(taken);	/* stays charged until the process ends */
	pthread_mutex_unlock(&lock);
}

static bool gone(uint64_t key)
{
	struct foreign *foreign = foreign_take(key);

	foreign_taken(foreign, key, true);
	return foreign;
}

struct search {
	CUcontext context;
	uint64_t key;
};

static void of_context(uint64_t key, void *value, void *argument)
{
	struct search *search = argument;
	const struct foreign *foreign = value;

	if (foreign->context == search->context)
		search->key = key;
}

static void context_gone(struct device *device, CUcontext context)
{
	struct search search;

	(void)device;
	do {
		search = (struct search){ .context = context };
		pthread_mutex_lock(&lock);
		table_each(&allocations, of_context, &search);
		pthread_mutex_unlock(&lock);
	} while (search.key && gone(search.key));
}

/* Physical memory */

void foreign_created(struct device *device, CUmemGenericAllocationHandle handle, uint64_t bytes)
{
	struct foreign *memory = device ? calloc(1, sizeof(*memory)) : NULL;

	if (!memory)
		return;
	*memory = (struct foreign){ .device = device, .bytes = bytes, .references = 1, .named = 1 };
	pthread_mutex_lock(&lock);
	if (!table_put(&handles, handle, memory))
		free(memory);
	pthread_mutex_unlock(&lock);
}

void foreign_is_multicast(CUmemGenericAllocationHandle handle, uint64_t number, void (*gone)(uint64_t))
{
	struct foreign *object = calloc(1, sizeof(*object));

	if (!object)
		return;
	*object = (struct foreign){ .references = 1, .named = 1, .multicast = number, .gone = gone };
	pthread_mutex_lock(&lock);
	if (!table_put(&handles, handle, object))
		free(object);
	pthread_mutex_unlock(&lock);
}

void foreign_is_import(struct device *device, CUmemGenericAllocationHandle handle, uint64_t name)
{
	struct foreign *import = calloc(1, sizeof(*import));

	if (!import)
		return;	/* its memory stays charged until the process ends */
	*import = (struct foreign){ .device = device, .references = 1, .named = 1, .import = true, .lent = name };
	pthread_mutex_lock(&lock);
	if (!table_put(&handles, handle, import))
		free(import);
	pthread_mutex_unlock(&lock);
}

uint64_t foreign_multicast(CUmemGenericAllocationHandle handle)
{
	pthread_mutex_lock(&lock);
	const struct foreign *object = table_get(&handles, handle);
	const uint64_t number = object ? object->multicast : 0;
	pthread_mutex_unlock(&lock);
	return number ? number : handle;
}

/* With `lock` held. */
static void export(struct foreign *memory, int fd)
{
	if (!memory)
		return;
	memory->exported = true;
	if (fd < 0 || memory->multicast || memory->managed)
		return;
	if (!memory->lent)
		memory->lent = LENT_FOREIGN(++numbers);
	lent_give(memory->lent, fd);
}

void foreign_exported(CUmemGenericAllocationHandle handle, int fd)
{
	pthread_mutex_lock(&lock);
	export(table_get(&handles, handle), fd);
	pthread_mutex_unlock(&lock);
}

/* Drops a reference. With `lock` held; returns the memory if it has no reference left. */
static struct foreign *put(struct foreign *memory)
{
	return --memory->references ? NULL : memory;
}

/* The mapping that holds `address`; mappings are keyed by their start. With `lock` held. */
static struct foreign *mapping_of(CUdeviceptr address)
{
	CUdeviceptr at = address & ~(GG_CHUNK - 1);

	for (size_t pages = 0; at && pages < MAPPING_PAGES; pages++, at -= GG_CHUNK) {
		struct foreign *mapping = table_get(&mappings, at);

		if (mapping)
			return address - at < mapping->mapped ? mapping : NULL;
	}
	return NULL;
}

void foreign_exported_at(CUdeviceptr address, int fd)
{
	const struct foreign *mapping;

	pthread_mutex_lock(&lock);
	mapping = mapping_of(address);
	export(mapping ? mapping->memory : table_get(&allocations, address), fd);
	pthread_mutex_unlock(&lock);
}

void foreign_retained(CUmemGenericAllocationHandle handle, CUdeviceptr mapped_at)
{
	struct foreign *memory, *mapping;

	pthread_mutex_lock(&lock);
	memory = table_get(&handles, handle);
	mapping = memory ? NULL : mapping_of(mapped_at);
	if (!memory && mapping)	/* its handle was released, and it gets one again */
		memory = table_put(&handles, handle, mapping->memory) ? mapping->memory : NULL;
	if (memory) {
		memory->references++;
		memory->named++;
	}
	pthread_mutex_unlock(&lock);
}

struct foreign *foreign_release(CUmemGenericAllocationHandle handle)
{
	struct foreign *memory;

	pthread_mutex_lock(&lock);
	memory = table_get(&handles, handle);
	if (memory && !--memory->named)
		table_take(&handles, handle);	/* the driver may reuse the value */
	pthread_mutex_unlock(&lock);
	return memory;
}

void foreign_released(struct foreign *memory, CUmemGenericAllocationHandle handle, bool released)
{
	struct foreign *dead = NULL;

	if (!memory)
		return;
	pthread_mutex_lock(&lock);
	if (released)
		dead = put(memory);
	else if (!memory->named++ && !table_put(&handles, handle, memory))
		memory->named = 0;	/* stays charged until the process ends */
	pthread_mutex_unlock(&lock);
	if (dead)
		drop(dead);
}

void foreign_mapped(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle handle)
{
	struct foreign *memory, *mapping;

	pthread_mutex_lock(&lock);
	memory = table_get(&handles, handle);
	mapping = memory ? calloc(1, sizeof(*mapping)) : NULL;
	if (mapping) {
		*mapping = (struct foreign){ .mapped = bytes, .memory = memory, .address = address };
		if (table_put(&mappings, address, mapping))
			memory->references++;
		else
			free(mapping);
	}
	pthread_mutex_unlock(&lock);
}

/* Mappings being removed. */
struct unmap {
	CUdeviceptr start;
	uint64_t bytes;
	struct foreign *taken;
};

/* With `lock` held. */
static uint64_t unmap_one(struct unmap *unmap, CUdeviceptr address)
{
	struct foreign *mapping = table_take(&mappings, address);

	if (!mapping)
		return GG_CHUNK;
	mapping->next = unmap->taken;
	unmap->taken = mapping;
	return mapping->mapped;
}

static void unmap_there(uint64_t key, void *value, void *argument)
{
	struct unmap *unmap = argument;

	(void)value;
	if (key - unmap->start < unmap->bytes)
		unmap_one(unmap, key);
}

/* The driver has not checked `bytes` yet. */
struct foreign *foreign_unmap(CUdeviceptr address, uint64_t bytes)
{
	struct unmap unmap = { .start = address, .bytes = bytes };

	pthread_mutex_lock(&lock);
	if (bytes / GG_CHUNK > mappings.map.size)
		table_each(&mappings, unmap_there, &unmap);
	else
		for (uint64_t at = 0; at < bytes;)
			at += unmap_one(&unmap, address + at);
	pthread_mutex_unlock(&lock);
	return unmap.taken;
}

void foreign_unmapped(struct foreign *taken, bool unmapped)
{
	for (struct foreign *mapping; (mapping = taken);) {
		struct foreign *dead = NULL;

		taken = mapping->next;
		pthread_mutex_lock(&lock);
		if (unmapped)
			dead = put(mapping->memory);
		if (unmapped || !table_put(&mappings, mapping->address, mapping))
			free(mapping);
		pthread_mutex_unlock(&lock);
		if (dead)
			drop(dead);
	}
}

/* With `lock` held. */
static struct foreign *bind(struct foreign *memory)
{
	if (memory && memory->multicast)	/* the driver refuses this */
		memory = NULL;
	if (memory)
		memory->references++;
	return memory;
}

struct foreign *foreign_bind(CUmemGenericAllocationHandle handle)
{
	pthread_mutex_lock(&lock);
	struct foreign *memory = bind(table_get(&handles, handle));
	pthread_mutex_unlock(&lock);
	return memory;
}

struct foreign *foreign_bind_at(CUdeviceptr address)
{
	pthread_mutex_lock(&lock);
	const struct foreign *mapping = mapping_of(address);
	struct foreign *memory = mapping ? bind(mapping->memory) : NULL;
	pthread_mutex_unlock(&lock);
	return memory;
}

void foreign_bind_again(struct foreign *memory)
{
	pthread_mutex_lock(&lock);
	memory->references++;
	pthread_mutex_unlock(&lock);
}

struct device *foreign_device(const struct foreign *memory)
{
	return memory->device;
}

void foreign_unbind(struct foreign *memory)
{
	pthread_mutex_lock(&lock);
	struct foreign *dead = put(memory);
	pthread_mutex_unlock(&lock);
	if (dead)
		drop(dead);
}

static bool in_host;	/* atomically */

void foreign_made_in_host(const CUmemLocation *location)
{
	if (location->type != CU_MEM_LOCATION_TYPE_DEVICE)
		__atomic_store_n(&in_host, true, __ATOMIC_RELAXED);
}

bool foreign_is_in_host(void)
{
	return __atomic_load_n(&in_host, __ATOMIC_RELAXED);
}

static bool shared;	/* atomically */

void foreign_share(void)
{
	__atomic_store_n(&shared, true, __ATOMIC_RELAXED);
}

bool foreign_is_shared(void)
{
	return __atomic_load_n(&shared, __ATOMIC_RELAXED);
}

static void forget(void)
{
	in_host = shared = false;
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	allocations = handles = mappings = (struct table){ 0 };
	for (int i = 0; i < GG_ORDINALS; i++)
		exact[i] = charged[i] = managed[i] = 0;
}

LIFE(.stage = LIFE_FOREIGN, .context_gone = context_gone, .forget = forget);
