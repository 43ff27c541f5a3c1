// SPDX-License-Identifier: Apache-2.0
#include "foreign.h"

#include "daemon.h"
#include "life.h"
#include "table.h"

#include <stdlib.h>

/* One allocation. */
struct foreign {
	struct device *device;
	uint64_t bytes;
	CUcontext context;
	bool managed;
	unsigned int references;	/* of physical memory: to its handle, and mappings */
	unsigned int named;		/* those to its handle */
	uint64_t mapped;		/* bytes of this mapping */
	struct foreign *memory;		/* of a mapping: what is behind it */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct table allocations;	/* by address, or handle of an array */
static struct table handles;		/* physical memory, by handle */
static struct table mappings;		/* by address */
/* Exact bytes of each device, by its ordinal; what is charged is that, rounded up. */
static uint64_t exact[GG_ORDINALS], charged[GG_ORDINALS], managed[GG_ORDINALS];

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

/* Managed bytes changed. */
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

static void add(struct device *device, uint64_t key, uint64_t bytes, CUcontext context,
		bool is_managed)
{
	struct foreign *foreign = device ? calloc(1, sizeof(*foreign)) : NULL;
	bool added;

	if (!foreign)
		return;	/* it stays charged until the process ends */
	*foreign = (struct foreign){
		.device = device, .bytes = bytes, .context = context, .managed = is_managed,
	};
	pthread_mutex_lock(&lock);
	added = table_put(&allocations, key, foreign);
	pthread_mutex_unlock(&lock);
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

static void drop(struct foreign *foreign)
{
	if (foreign->managed)
		name(foreign->device, foreign->bytes, false);
	else
		foreign_uncharge(foreign->device, foreign->bytes);
	free(foreign);
}

bool foreign_gone(uint64_t key)
{
	struct foreign *foreign;

	pthread_mutex_lock(&lock);
	foreign = table_take(&allocations, key);
	pthread_mutex_unlock(&lock);
	if (foreign)
		drop(foreign);
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
	} while (search.key && foreign_gone(search.key));
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

/* One reference less. With the lock; returns what has none any more. */
static struct foreign *put(struct foreign *memory)
{
	return --memory->references ? NULL : memory;
}

void foreign_retained(CUmemGenericAllocationHandle handle, CUdeviceptr mapped_at)
{
	struct foreign *memory, *mapping;

	pthread_mutex_lock(&lock);
	memory = table_get(&handles, handle);
	mapping = table_get(&mappings, mapped_at & ~(GG_CHUNK - 1));
	if (!memory && mapping)	/* its handle was released: it has one again */
		memory = table_put(&handles, handle, mapping->memory) ? mapping->memory : NULL;
	if (memory) {
		memory->references++;
		memory->named++;
	}
	pthread_mutex_unlock(&lock);
}

void foreign_released(CUmemGenericAllocationHandle handle)
{
	struct foreign *memory, *dead = NULL;

	pthread_mutex_lock(&lock);
	memory = table_get(&handles, handle);
	if (memory && !--memory->named)
		table_take(&handles, handle);	/* the driver may use the value again */
	if (memory)
		dead = put(memory);
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
		*mapping = (struct foreign){ .mapped = bytes, .memory = memory };
		if (table_put(&mappings, address, mapping))
			memory->references++;
		else
			free(mapping);
	}
	pthread_mutex_unlock(&lock);
}

void foreign_unmapped(CUdeviceptr address, uint64_t bytes)
{
	const CUdeviceptr end = address + bytes;

	while (address < end) {
		struct foreign *mapping, *dead = NULL;
		uint64_t step = GG_CHUNK;

		pthread_mutex_lock(&lock);
		mapping = table_take(&mappings, address);
		if (mapping) {
			step = mapping->mapped;
			dead = put(mapping->memory);
			free(mapping);
		}
		pthread_mutex_unlock(&lock);
		if (dead)
			drop(dead);
		address += step;
	}
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
