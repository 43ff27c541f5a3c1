// SPDX-License-Identifier: Apache-2.0
/*
 * Memory: physical memory is a piece of one memfd, addresses are those of this process, mapping is mmap. What
 * is not mapped, or not accessible, faults; a kernel that runs while its memory moves gets SIGSEGV, or loses
 * what it writes.
 */
#include "memory.h"
#include "lease.h"
#include "timed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GRANULE (UINT64_C(2) << 20)
#define DEVICES 16
/* FAKE_BUSY (fake.h); measured on two H200s. */
#define BUSY_NS 16000000

/* Physical memory: a CUmemGenericAllocationHandle is a pointer to one. */
struct memory {
	uint64_t magic;
	uint64_t bytes;
	CUmemAllocationProp prop;
	int fd;			/* the memfd: one for all, but for memory that can be exported */
	off_t offset;		/* in that */
	bool imported;		/* another process's, or exported by this one and still here: it counts there */
	bool descriptor;	/* it came by one */
	ino_t file;		/* of memory that can be exported */
	unsigned int handles, mappings;
	struct bound *bound;	/* to a multicast object */
	struct lease *leases;	/* descriptors that were given of it */
	struct memory *next;	/* all that live; of spares, the next one */
};
#define MAGIC UINT64_C(0x6d656d6f7279aa01)

/* What is bound to a multicast object. */
struct bound {
	struct bound *next;
	uint64_t offset, bytes;
	struct memory *memory;	/* NULL: an allocation of the driver's own, which does not live longer */
};

/* Reserved addresses, mappings in them, and allocations of the driver's own; sorted by nothing. */
struct range {
	struct range *next;
	uint64_t start, bytes;
	struct memory *memory;	/* of a mapping */
	uint64_t offset;	/* of a mapping, in that */
	uint64_t accessible;	/* a bit a device */
	uint64_t read_only;	/* of those */
	CUcontext context;	/* of an allocation */
	CUdevice device;
	bool managed, host, graph;
	CUmemoryPool pool;
	unsigned long long id;
	uint64_t charged;	/* bytes of the GPU */
};

/* Memory that has neither a handle nor a mapping any more, and descriptors perhaps. */
static struct orphan {
	struct orphan *next;
	CUdevice device;
	uint64_t bytes;
	struct lease *leases;
	ino_t file;
} *orphans;

/* What was exported: what is imported here is what it was. */
static struct export {
	ino_t file;
	CUmemAllocationProp prop;
	struct export *next;
} *exports;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct memory *memories, *spares;
static const CUmemAllocationProp on_gpu = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
static struct range *reservations, *mappings, *allocations, *copies;
static uint64_t gpu_bytes[DEVICES], host_bytes;
static struct CUmemPoolHandle_st default_pools[DEVICES];
static CUmemoryPool current_pools[DEVICES];
static int arena = -1;
static off_t arena_end;
static unsigned long long ids;

static uint64_t capacity(void)
{
	return fake_number("FAKE_MEMORY", UINT64_C(1) << 30);
}

/* What tests ask: not of the real driver. GPU: physical memory that exists on the device; host: pinned by
 * cuMemCreate; addresses: bytes reserved. */
__attribute__((visibility("default"))) void fake_memory_usage(int device, uint64_t *gpu, uint64_t *host,
							      uint64_t *addresses)
{
	pthread_mutex_lock(&lock);
	*gpu = gpu_bytes[device];
	*host = host_bytes;
	*addresses = 0;
	for (struct range *range = reservations; range; range = range->next)
		*addresses += range->bytes;
	pthread_mutex_unlock(&lock);
}

/* Bytes on the device that this process has let go of, and that live by descriptors. */
__attribute__((visibility("default"))) uint64_t fake_memory_lent(int device)
{
	uint64_t bytes = 0;

	pthread_mutex_lock(&lock);
	for (struct orphan **at = &orphans, *orphan; (orphan = *at);) {
		if (!lease_any(&orphan->leases)) {
			*at = orphan->next;
			free(orphan);
			continue;
		}
		bytes += orphan->device == device ? orphan->bytes : 0;
		at = &orphan->next;
	}
	pthread_mutex_unlock(&lock);
	return bytes;
}

int fake_memory_lease(CUdeviceptr address, uint64_t bytes)
{
	struct memory *first = NULL;
	int fd = -1;

	pthread_mutex_lock(&lock);
	for (struct range *range = mappings; range; range = range->next) {
		if (range->start >= address + bytes || address >= range->start + range->bytes)
			continue;
		if (!first) {
			first = range->memory;
			fd = lease_make(&first->leases, first->fd);
		} else if (range->memory != first) {
			lease_share(first->leases, &range->memory->leases);
		}
	}
	pthread_mutex_unlock(&lock);
	return fd;
}

/* Physical memory that this process has a handle of, or has mapped: what a checkpoint would have to carry. In the host,
 * what the driver could not restore. */
__attribute__((visibility("default"))) uint64_t fake_memory_objects(bool host)
{
	uint64_t count = 0;

	pthread_mutex_lock(&lock);
	for (struct memory *memory = memories; memory; memory = memory->next)
		count += (memory->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE) == host;
	pthread_mutex_unlock(&lock);
	return count;
}

/* Where the memory at `address` is: the location type of what is mapped there, -1 for nothing. */
__attribute__((visibility("default"))) int fake_memory_place(CUdeviceptr address)
{
	int place = -1;

	pthread_mutex_lock(&lock);
	for (struct range *range = mappings; range; range = range->next)
		if (address >= range->start && address < range->start + range->bytes)
			place = (int)range->memory->prop.location.type;
	pthread_mutex_unlock(&lock);
	return place;
}

static struct range *containing(struct range *list, uint64_t address);

bool fake_memory_in_host(CUdeviceptr address, uint64_t bytes, uint64_t *end)
{
	bool host = false;

	*end = bytes;
	pthread_mutex_lock(&lock);
	const struct range *range = containing(mappings, address);

	if (!range && containing(reservations, address))
		fake_die("%llx is read: nothing is mapped there", address);
	if (range) {
		host = range->memory->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE;
		if (range->start + range->bytes - address < bytes)
			*end = range->start + range->bytes - address;
	}
	pthread_mutex_unlock(&lock);
	return host;
}

static struct range *containing(struct range *list, uint64_t address)
{
	for (struct range *range = list; range; range = range->next)
		if (address >= range->start && address < range->start + range->bytes)
			return range;
	return NULL;
}

static struct range *add(struct range **list, uint64_t start, uint64_t bytes)
{
	struct range *range = calloc(1, sizeof(*range));

	if (!range)
		fake_die("out of memory");
	range->start = start;
	range->bytes = bytes;
	range->next = *list;
	*list = range;
	return range;
}

static void drop(struct range **list, struct range *range)
{
	while (*list != range)
		list = &(*list)->next;
	*list = range->next;
	free(range);
}

static bool overlaps(const struct range *list, uint64_t start, uint64_t bytes)
{
	for (; list; list = list->next)
		if (start < list->start + list->bytes && list->start < start + bytes)
			return true;
	return false;
}

static void clear(uint64_t start, uint64_t bytes)
{
	if (mmap((void *)start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
	    MAP_FAILED)
		fake_die("mmap: %s", strerror(errno));
}

/* Addresses of an allocation that was freed last: the driver gives them out again at once. */
static struct {
	uint64_t start, bytes;
} spare;

/* With the lock. */
static void give_up(uint64_t start, uint64_t bytes)
{
	if (spare.start)
		munmap((void *)spare.start, spare.bytes);
	clear(start, bytes);
	spare.start = start;
	spare.bytes = bytes;
}

/* With the lock; 0: there is none. */
static uint64_t take_spare(uint64_t bytes)
{
	const uint64_t start = spare.bytes == bytes ? spare.start : 0;

	if (start)
		spare.start = spare.bytes = 0;
	return start;
}

/* Addresses of our own, aligned, that nothing can be done with. */
static uint64_t reserve(uint64_t bytes, uint64_t alignment)
{
	uint8_t *raw = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	uint8_t *start;

	if (raw == MAP_FAILED)
		return 0;
	start = (uint8_t *)(((uintptr_t)raw + alignment - 1) & ~(uintptr_t)(alignment - 1));
	if (start > raw)
		munmap(raw, (size_t)(start - raw));
	munmap(start + bytes, (size_t)(raw + alignment - start));
	return (uintptr_t)start;
}

/* Virtual memory management */

FAKE_EXPORT cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
					  CUmemAllocationGranularity_flags option)
{
	FAKE(cuMemGetAllocationGranularity);
	(void)option;
	if (!granularity || !prop)
		return CUDA_ERROR_INVALID_VALUE;
	*granularity = GRANULE;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
				unsigned long long flags)
{
	FAKE(cuMemAddressReserve);
	(void)addr;
	if (!ptr || !size || size % GRANULE || (alignment & (alignment - 1)) || flags)
		fake_die("cuMemAddressReserve(%zu, %zu)", size, alignment);
	uint64_t start = reserve(size, alignment > GRANULE ? alignment : GRANULE);

	if (!start)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	add(&reservations, start, size);
	pthread_mutex_unlock(&lock);
	*ptr = start;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	FAKE(cuMemAddressFree);
	pthread_mutex_lock(&lock);
	struct range *range = containing(reservations, ptr);

	if (!range || range->start != ptr || range->bytes != size)
		fake_die("cuMemAddressFree(%llx, %zu): not what was reserved", ptr, size);
	if (overlaps(mappings, ptr, size))
		fake_die("cuMemAddressFree(%llx, %zu): something is still mapped there", ptr, size);
	drop(&reservations, range);
	munmap((void *)ptr, size);
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

static struct memory *memory_of(CUmemGenericAllocationHandle handle, const char *what)
{
	struct memory *memory = memories;

	while (memory && memory != (struct memory *)(uintptr_t)handle)
		memory = memory->next;
	if (!memory || memory->magic != MAGIC || !memory->handles)
		fake_die("%s: %llx is no handle", what, handle);
	return memory;
}

static bool unbind(struct bound **at, uint64_t offset, uint64_t bytes);

static void leave(const struct memory *memory)
{
	struct orphan *orphan = malloc(sizeof(*orphan));

	if (!orphan)
		fake_die("out of memory");
	*orphan = (struct orphan){ .next = orphans, .device = memory->prop.location.id, .bytes = memory->bytes,
				   .leases = memory->leases, .file = memory->file };
	orphans = orphan;
}

/* Another handle or mapping of what was imported or exported; NULL: this is the last. */
static struct memory *other_of(const struct memory *memory)
{
	struct memory *other = memory->file ? memories : NULL;

	while (other && (other == memory || other->file != memory->file))
		other = other->next;
	return other;
}

static void forget(struct memory *memory)
{
	struct memory **at = &memories, *other;

	if (memory->handles || memory->mappings)
		return;
	unbind(&memory->bound, 0, UINT64_MAX);
	other = other_of(memory);
	if (other) {
		/* It lives on, under the other handle, and so do descriptors that were given of either. */
		lease_move(&memory->leases, &other->leases);
		other->imported &= memory->imported;
		memory->imported = true;
	}
	if (memory->imported)
		;
	else if (memory->prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE)
		gpu_bytes[memory->prop.location.id] -= memory->bytes;
	else
		host_bytes -= memory->bytes;
	if (memory->leases && !memory->imported)
		leave(memory);
	if (memory->fd != arena)
		close(memory->fd);
	else if (fallocate(arena, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, (off_t)memory->bytes))
		fake_die("fallocate: %s", strerror(errno));
	while (*at != memory)
		at = &(*at)->next;
	*at = memory->next;
	memory->magic = 0;
	memory->next = spares;
	spares = memory;
}

/* The driver gives the value of a handle out again, often at once: here the last one that memory of such properties
 * had, so that a program meets those of its own again. */
static struct memory *new_memory(const CUmemAllocationProp *prop)
{
	struct memory **at = &spares, *memory;

	pthread_mutex_lock(&lock);
	while (*at && memcmp(&(*at)->prop, prop, sizeof(*prop)))
		at = &(*at)->next;
	memory = *at;
	if (memory)
		*at = memory->next;
	pthread_mutex_unlock(&lock);
	return memory ? memory : calloc(1, sizeof(*memory));
}

static ino_t file_of(int fd)
{
	struct stat status;

	if (fstat(fd, &status))
		fake_die("fstat: %s", strerror(errno));
	return status.st_ino;
}

/* With the lock. */
static const struct export *exported(ino_t file)
{
	const struct export *export = exports;

	while (export && export->file != file)
		export = export->next;
	return export;
}

/* Others have the driver busy. */
static bool is_busy(void)
{
	const char *path = getenv("FAKE_BUSY");

	return path && !access(path, F_OK);
}

FAKE_EXPORT cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
			unsigned long long flags)
{
	FAKE(cuMemCreate);
	if (!handle || !prop || flags || !size || size % GRANULE || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
		fake_die("cuMemCreate(%zu)", size);
	const bool host = prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;

	if (!host && (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id >= fake_devices()))
		fake_die("cuMemCreate: location %d of type %d", prop->location.id, (int)prop->location.type);
	if (is_busy())
		nanosleep(&(struct timespec){ .tv_nsec = BUSY_NS }, NULL);
	fake_timed_call(FAKE_CREATE, host, size);
	struct memory *memory = new_memory(prop);

	pthread_mutex_lock(&lock);
	uint64_t *sum = host ? &host_bytes : &gpu_bytes[prop->location.id];

	if (*sum + size > (host ? fake_number("FAKE_HOST_MEMORY", UINT64_MAX / 2) : capacity())) {
		memory->next = spares;
		spares = memory;
		pthread_mutex_unlock(&lock);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (arena < 0)
		arena = memfd_create("fake-gpu", MFD_CLOEXEC);
	*memory = (struct memory){ .magic = MAGIC, .bytes = size, .prop = *prop, .handles = 1, .next = memories };
	if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
		memory->fd = memfd_create("fake-gpu-shared", MFD_CLOEXEC);
		if (memory->fd < 0 || ftruncate(memory->fd, (off_t)size))
			fake_die("memfd: %s", strerror(errno));
		memory->file = file_of(memory->fd);
	} else {
		memory->fd = arena;
		memory->offset = arena_end;
		arena_end += (off_t)size;
		if (arena < 0 || ftruncate(arena, arena_end))
			fake_die("memfd: %s", strerror(errno));
	}
	memories = memory;
	*sum += size;
	pthread_mutex_unlock(&lock);
	*handle = (uintptr_t)memory;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemRelease(CUmemGenericAllocationHandle handle)
{
	FAKE(cuMemRelease);
	pthread_mutex_lock(&lock);
	struct memory *memory = memory_of(handle, "cuMemRelease");
	const bool host = memory->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE;
	const uint64_t bytes = memory->handles + memory->mappings == 1 ? memory->bytes : 0;

	memory->handles--;
	forget(memory);
	pthread_mutex_unlock(&lock);
	fake_timed_call(FAKE_RELEASE, host, bytes);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
					 CUmemAllocationHandleType handleType, unsigned long long flags)
{
	FAKE(cuMemExportToShareableHandle);
	pthread_mutex_lock(&lock);
	struct memory *memory = memory_of(handle, "cuMemExportToShareableHandle");

	if (flags || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || memory->fd == arena)
		fake_die("cuMemExportToShareableHandle: it was not made to be exported");
	if (memory->descriptor) {	/* measured: docs/nvidia.md */
		pthread_mutex_unlock(&lock);
		return CUDA_ERROR_INVALID_VALUE;
	}
	*(int *)shareableHandle = fake_number("FAKE_LENT", 0) ? lease_make(&memory->leases, memory->fd) :
								fcntl(memory->fd, F_DUPFD_CLOEXEC, 3);
	if (!exported(memory->file)) {
		struct export *export = calloc(1, sizeof(*export));

		*export = (struct export){ .file = memory->file, .prop = memory->prop, .next = exports };
		exports = export;
	}
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
					   CUmemAllocationHandleType shHandleType)
{
	FAKE(cuMemImportFromShareableHandle);
	struct memory *memory = new_memory(&on_gpu);
	const int fd = lease_open((int)(intptr_t)osHandle);
	struct stat status;

	if (!memory || shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fd < 0 || fstat(fd, &status))
		fake_die("cuMemImportFromShareableHandle: no descriptor");
	*memory = (struct memory){ .magic = MAGIC, .bytes = (uint64_t)status.st_size, .handles = 1, .imported = true,
				    .descriptor = true };
	memory->prop = on_gpu;
	memory->fd = fd;
	memory->file = status.st_ino;
	pthread_mutex_lock(&lock);
	const struct export *export = exported(memory->file);

	if (export) {
		memory->prop = export->prop;
		memory->imported = other_of(memory) != NULL;
	}
	/* It has a handle again. */
	for (struct orphan **at = &orphans, *orphan; (orphan = *at); at = &orphan->next)
		if (orphan->file == memory->file) {
			*at = orphan->next;
			memory->leases = orphan->leases;
			free(orphan);
			break;
		}
	if (!memory->imported)
		*(memory->prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE ? &gpu_bytes[memory->prop.location.id] :
									   &host_bytes) += memory->bytes;
	memory->next = memories;
	memories = memory;
	pthread_mutex_unlock(&lock);
	*handle = (uintptr_t)memory;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
		     unsigned long long flags)
{
	FAKE(cuMemMap);
	pthread_mutex_lock(&lock);
	struct memory *memory = memory_of(handle, "cuMemMap");
	struct range *reserved = containing(reservations, ptr);

	if (flags || (offset && !fake_number("FAKE_OFFSETS", 0)) || !size || (size | offset | ptr) % GRANULE ||
	    offset > memory->bytes || size > memory->bytes - offset)
		fake_die("cuMemMap(%llx, %zu, %zu)", ptr, size, offset);
	if (!reserved || ptr + size > reserved->start + reserved->bytes)
		fake_die("cuMemMap(%llx, %zu): not reserved", ptr, size);
	if (overlaps(mappings, ptr, size))
		fake_die("cuMemMap(%llx, %zu): something is mapped there", ptr, size);
	if (mmap((void *)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd,
		 memory->offset + (off_t)offset) == MAP_FAILED)
		fake_die("mmap: %s", strerror(errno));
	struct range *mapping = add(&mappings, ptr, size);

	mapping->memory = memory;
	mapping->offset = offset;
	memory->mappings++;
	pthread_mutex_unlock(&lock);
	fake_timed_call(FAKE_MAP, false, size);
	return CUDA_SUCCESS;
}

/* Whether mappings cover [start, start + bytes) exactly. With the lock. */
static bool covered(uint64_t start, uint64_t bytes)
{
	uint64_t at = start;

	while (at < start + bytes) {
		struct range *range = containing(mappings, at);

		if (!range || range->start != at)
			return false;
		at += range->bytes;
	}
	return at == start + bytes;
}

/* Calls about memory of the host that is mapped, since this was last asked. */
static struct {
	uint64_t accesses, unmaps;
} of_host;

__attribute__((visibility("default"))) void fake_memory_of_host(uint64_t *accesses, uint64_t *unmaps)
{
	pthread_mutex_lock(&lock);
	*accesses = of_host.accesses;
	*unmaps = of_host.unmaps;
	of_host.accesses = of_host.unmaps = 0;
	pthread_mutex_unlock(&lock);
}

FAKE_EXPORT cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	FAKE(cuMemUnmap);
	pthread_mutex_lock(&lock);
	if (!covered(ptr, size))
		fake_die("cuMemUnmap(%llx, %zu): not whole mappings", ptr, size);
	if (overlaps(copies, ptr, size))
		fake_die("cuMemUnmap(%llx, %zu): a copy is still queued", ptr, size);
	const bool host = containing(mappings, ptr)->memory->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE;

	of_host.unmaps += host;

	for (uint64_t at = ptr; at < ptr + size;) {
		struct range *range = containing(mappings, at);

		at += range->bytes;
		range->memory->mappings--;
		forget(range->memory);
		drop(&mappings, range);
	}
	clear(ptr, size);
	pthread_mutex_unlock(&lock);
	fake_timed_call(FAKE_UNMAP, host, size);
	return CUDA_SUCCESS;
}

/* What others than the program's GPUs get at: it has to be memory that the driver knows as the program's, and on a
 * GPU. */
static void must_be_on_gpu(const struct memory *memory, const char *what)
{
	if (memory->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		fake_die("%s: it is in the host", what);
}

/* The most bytes that one call has made accessible, but where one mapping is as large, since this was last asked. */
static uint64_t widest;

__attribute__((visibility("default"))) uint64_t fake_memory_widest(void)
{
	pthread_mutex_lock(&lock);
	const uint64_t bytes = widest;

	widest = 0;
	pthread_mutex_unlock(&lock);
	return bytes;
}

FAKE_EXPORT cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
	FAKE(cuMemSetAccess);
	pthread_mutex_lock(&lock);
	if (!desc || !count || !covered(ptr, size))
		fake_die("cuMemSetAccess(%llx, %zu): not whole mappings", ptr, size);
	if (size > widest && containing(mappings, ptr)->bytes < size)
		widest = size;
	const bool host = containing(mappings, ptr)->memory->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE;

	of_host.accesses += host;

	for (size_t i = 0; i < count; i++) {
		if (desc[i].location.type == CU_MEM_LOCATION_TYPE_HOST) {
			for (uint64_t at = ptr; at < ptr + size; at += containing(mappings, at)->bytes)
				must_be_on_gpu(containing(mappings, at)->memory, "cuMemSetAccess for the host");
			continue;
		}
		if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc[i].location.id >= fake_devices())
			fake_die("cuMemSetAccess: location %d of type %d", desc[i].location.id,
				 (int)desc[i].location.type);
		for (uint64_t at = ptr; at < ptr + size; at += containing(mappings, at)->bytes) {
			const uint64_t bit = UINT64_C(1) << desc[i].location.id;
			struct range *range = containing(mappings, at);

			range->accessible &= ~bit;
			range->read_only &= ~bit;
			if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
				range->accessible |= bit;
			if (desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ)
				range->read_only |= bit;
		}
	}
	for (uint64_t at = ptr; at < ptr + size; at += containing(mappings, at)->bytes) {
		const struct range *range = containing(mappings, at);
		const int none = range->accessible ? PROT_READ : PROT_NONE;

		if (mprotect((void *)range->start, range->bytes,
			     range->accessible & ~range->read_only ? PROT_READ | PROT_WRITE : none))
			fake_die("mprotect: %s", strerror(errno));
	}
	pthread_mutex_unlock(&lock);
	fake_timed_call(FAKE_ACCESS, host, size);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	FAKE(cuMemGetAccess);
	if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE || location->id >= fake_devices())
		return result;
	pthread_mutex_lock(&lock);
	const struct range *range = containing(mappings, ptr);
	const uint64_t bit = UINT64_C(1) << location->id;

	if (range) {
		*flags = !(range->accessible & bit) ? CU_MEM_ACCESS_FLAGS_PROT_NONE :
			 range->read_only & bit ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

FAKE_EXPORT cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
	FAKE(cuMemGetAllocationPropertiesFromHandle);
	pthread_mutex_lock(&lock);
	*prop = memory_of(handle, "cuMemGetAllocationPropertiesFromHandle")->prop;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	FAKE(cuMemRetainAllocationHandle);
	pthread_mutex_lock(&lock);
	struct range *range = containing(mappings, (uintptr_t)address);

	if (range) {
		range->memory->handles++;
		*handle = (uintptr_t)range->memory;
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

/* The driver's own allocations */

CUresult fake_allocate(CUdeviceptr *ptr, size_t bytes, enum fake_memory_kind kind, CUmemoryPool pool)
{
	const CUcontext context = fake_context();
	const uint64_t whole = (bytes + GRANULE - 1) & ~(GRANULE - 1);
	struct range *range;

	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!ptr || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	const CUdevice device = pool ? pool->device : fake_device_of(context);

	pthread_mutex_lock(&lock);
	if (kind == FAKE_PLAIN && (whole < bytes || gpu_bytes[device] + whole > capacity())) {
		pthread_mutex_unlock(&lock);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*ptr = take_spare(whole);
	if (!*ptr)
		*ptr = reserve(whole, GRANULE);
	if (!*ptr || mprotect((void *)*ptr, whole, PROT_READ | PROT_WRITE))
		fake_die("mmap: %s", strerror(errno));
	range = add(&allocations, *ptr, bytes);
	range->context = context;
	range->device = device;
	range->managed = kind == FAKE_MANAGED;
	range->graph = kind == FAKE_OF_GRAPH;
	range->pool = pool;
	range->id = ++ids;
	range->charged = kind == FAKE_PLAIN ? whole : 0;
	gpu_bytes[device] += range->charged;
	if (pool)
		__atomic_add_fetch(&pool->used, bytes, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

/* With the lock. */
static void deallocate(struct range *range)
{
	gpu_bytes[range->device] -= range->charged;
	if (range->pool)
		__atomic_sub_fetch(&range->pool->used, range->bytes, __ATOMIC_RELAXED);
	give_up(range->start, (range->bytes + GRANULE - 1) & ~(GRANULE - 1));
	drop(&allocations, range);
}

bool fake_deallocate(CUdeviceptr address)
{
	struct range *range;

	pthread_mutex_lock(&lock);
	range = containing(allocations, address);
	if (range && (range->start != address || range->host))
		range = NULL;
	if (range)
		deallocate(range);
	pthread_mutex_unlock(&lock);
	return range;
}

uint64_t fake_allocated(CUdeviceptr address, CUmemoryPool *pool)
{
	uint64_t bytes = 0;

	pthread_mutex_lock(&lock);
	const struct range *range = containing(allocations, address);

	if (range && range->start == address) {
		bytes = range->bytes;
		*pool = range->pool;
	}
	pthread_mutex_unlock(&lock);
	return bytes;
}

bool fake_managed(CUdeviceptr address, uint64_t *start, uint64_t *bytes, uint64_t *id)
{
	pthread_mutex_lock(&lock);
	const struct range *range = containing(allocations, address);
	const bool managed = range && range->managed;

	if (managed) {
		*start = range->start;
		*bytes = range->bytes;
		*id = range->id;
	}
	pthread_mutex_unlock(&lock);
	return managed;
}

FAKE_EXPORT cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	CUresult result = fake_unsafe();

	FAKE(cuMemAlloc_v2);
	return result ? result : fake_allocate(dptr, bytesize, FAKE_PLAIN, NULL);
}

FAKE_EXPORT cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
			       unsigned int element)
{
	CUresult result = fake_unsafe();

	FAKE(cuMemAllocPitch_v2);
	if (!pPitch || (element != 4 && element != 8 && element != 16))
		return CUDA_ERROR_INVALID_VALUE;
	*pPitch = (WidthInBytes + 511) & ~(size_t)511;
	return result ? result : fake_allocate(dptr, *pPitch * Height, FAKE_PLAIN, NULL);
}

FAKE_EXPORT cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	FAKE(cuMemAllocManaged);
	if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
		return CUDA_ERROR_INVALID_VALUE;
	return fake_allocate(dptr, bytesize, FAKE_MANAGED, NULL);
}

FAKE_EXPORT cuMemFree_v2(CUdeviceptr dptr)
{
	CUresult result = fake_unsafe();

	FAKE(cuMemFree_v2);
	if (result || !dptr)
		return result;
	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	fake_drain_context(fake_context());
	return fake_deallocate(dptr) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult host_allocate(void **pp, size_t bytes)
{
	void *memory;

	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!pp || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (posix_memalign(&memory, 4096, bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	struct range *range = add(&allocations, (uintptr_t)memory, bytes);

	range->context = fake_context();
	range->device = fake_device_of(range->context);
	range->host = true;
	range->id = ++ids;
	pthread_mutex_unlock(&lock);
	*pp = memory;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	FAKE(cuMemAllocHost_v2);
	return host_allocate(pp, bytesize);
}

FAKE_EXPORT cuMemHostAlloc(void **pp, size_t bytesize, unsigned int flags)
{
	FAKE(cuMemHostAlloc);
	(void)flags;
	return host_allocate(pp, bytesize);
}

FAKE_EXPORT cuMemFreeHost(void *p)
{
	struct range *range;

	FAKE(cuMemFreeHost);
	pthread_mutex_lock(&lock);
	range = containing(allocations, (uintptr_t)p);
	if (!range || !range->host)
		fake_die("cuMemFreeHost(%p)", p);
	drop(&allocations, range);
	pthread_mutex_unlock(&lock);
	free(p);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int flags)
{
	FAKE(cuMemHostGetDevicePointer_v2);
	(void)flags;
	*pdptr = (uintptr_t)p;
	return CUDA_SUCCESS;
}

/* For what is to be on a GPU, and stay, while something but the program gets at it. */

CUmemGenericAllocationHandle fake_memory_multicast(uint64_t bytes)
{
	struct memory *memory = new_memory(&on_gpu);

	pthread_mutex_lock(&lock);
	*memory = (struct memory){ .magic = MAGIC, .bytes = bytes,
				    .fd = memfd_create("fake-gpu-multicast", MFD_CLOEXEC),
				    .handles = 1, .imported = true, .next = memories };
	memory->prop = on_gpu;
	if (memory->fd < 0 || ftruncate(memory->fd, (off_t)bytes))
		fake_die("memfd: %s", strerror(errno));
	memory->file = file_of(memory->fd);
	memories = memory;
	pthread_mutex_unlock(&lock);
	return (uintptr_t)memory;
}

struct memory *fake_memory_keep(CUmemGenericAllocationHandle handle, uint64_t offset, uint64_t bytes, const char *what)
{
	pthread_mutex_lock(&lock);
	struct memory *memory = memory_of(handle, what);

	must_be_on_gpu(memory, what);
	if (offset > memory->bytes || bytes > memory->bytes - offset)
		fake_die("%s: it has %llu bytes", what, (unsigned long long)memory->bytes);
	memory->mappings++;
	pthread_mutex_unlock(&lock);
	return memory;
}

/* False: it does not end within the object. With the lock. */
static bool bind(CUmemGenericAllocationHandle object, struct bound bound, const char *what)
{
	struct memory *to = memory_of(object, what);
	struct bound *more;

	if ((bound.offset | bound.bytes) % GRANULE)
		fake_die("%s: a binding of %llu bytes", what, (unsigned long long)bound.bytes);
	if (bound.offset + bound.bytes > to->bytes)
		return false;
	more = malloc(sizeof(*more));
	if (!more)
		fake_die("out of memory");
	*more = bound;
	more->next = to->bound;
	to->bound = more;
	if (bound.memory)
		bound.memory->mappings++;
	return true;
}

/* What lies in [offset, offset + bytes), or the part that does of what ends beside it. With the lock. */
static bool unbind(struct bound **at, uint64_t offset, uint64_t bytes)
{
	const uint64_t end = bytes < UINT64_MAX - offset ? offset + bytes : UINT64_MAX;
	struct bound *bound, *more;
	bool any = false;

	while ((bound = *at)) {
		const uint64_t last = bound->offset + bound->bytes;

		if (bound->offset >= end || last <= offset) {
			at = &bound->next;
			continue;
		}
		any = true;
		if (bound->offset < offset && last > end) {
			more = malloc(sizeof(*more));
			if (!more)
				fake_die("out of memory");
			*more = (struct bound){ bound->next, end, last - end, bound->memory };
			if (more->memory)
				more->memory->mappings++;
			bound->next = more;
		}
		if (bound->offset < offset || last > end) {
			const uint64_t from = bound->offset < offset ? bound->offset : end;

			bound->bytes = (bound->offset < offset ? offset : last) - from;
			bound->offset = from;
			at = &bound->next;
			continue;
		}
		*at = bound->next;
		if (bound->memory) {
			bound->memory->mappings--;
			forget(bound->memory);
		}
		free(bound);
	}
	return any;
}

bool fake_memory_bind(CUmemGenericAllocationHandle object, uint64_t offset, CUmemGenericAllocationHandle handle,
		      uint64_t from, uint64_t bytes, const char *what)
{
	struct memory *memory = fake_memory_keep(handle, from, bytes, what);

	pthread_mutex_lock(&lock);
	const bool bound = bind(object, (struct bound){ .offset = offset, .bytes = bytes, .memory = memory }, what);

	memory->mappings--;
	pthread_mutex_unlock(&lock);
	return bound;
}

/* "The size cannot be larger than the size of the allocated memory." */
bool fake_memory_bind_at(CUmemGenericAllocationHandle object, uint64_t offset, CUdeviceptr address, uint64_t bytes,
			 const char *what)
{
	const bool known = fake_memory_known(address, bytes, what);

	pthread_mutex_lock(&lock);
	const struct range *mapping = containing(mappings, address);
	const struct range *range = mapping ? mapping : containing(allocations, address);
	const bool one = known && range && bytes <= range->start + range->bytes - address;
	const struct bound bound = { .offset = offset, .bytes = bytes, .memory = mapping ? mapping->memory : NULL };
	const bool is_bound = one && bind(object, bound, what);

	pthread_mutex_unlock(&lock);
	return is_bound;
}

bool fake_memory_unbind(CUmemGenericAllocationHandle object, uint64_t offset, uint64_t bytes, const char *what)
{
	pthread_mutex_lock(&lock);
	const bool any = unbind(&memory_of(object, what)->bound, offset, bytes);
	pthread_mutex_unlock(&lock);
	return any;
}

void fake_memory_let_go(struct memory *memory)
{
	pthread_mutex_lock(&lock);
	memory->mappings--;
	forget(memory);
	pthread_mutex_unlock(&lock);
}

bool fake_memory_known(CUdeviceptr address, uint64_t bytes, const char *what)
{
	uint64_t at = address;

	pthread_mutex_lock(&lock);
	while (at < address + bytes) {
		struct range *range = containing(mappings, at);

		if (range)
			must_be_on_gpu(range->memory, what);
		else
			range = containing(allocations, at);
		if (!range || range->host)
			break;
		at = range->start + range->bytes;
	}
	pthread_mutex_unlock(&lock);
	return at >= address + bytes;
}

/* A context that ends takes its allocations with it; what was mapped stays. */
void fake_memory_context_gone(CUcontext context)
{
	pthread_mutex_lock(&lock);
	for (struct range *range = allocations, *next; range; range = next) {
		next = range->next;
		if (range->context == context && !range->host)
			deallocate(range);
	}
	pthread_mutex_unlock(&lock);
}

FAKE_EXPORT cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
	FAKE(cuMemGetInfo_v2);
	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&lock);
	if (free_bytes)
		*free_bytes = capacity() - gpu_bytes[fake_device_of(fake_context())];
	if (total)
		*total = capacity();
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

/* Before CUDA 3.2 figures had 32 bits. */
FAKE_EXPORT cuMemGetInfo(unsigned int *free_bytes, unsigned int *total)
{
	size_t left, all;
	CUresult result;

	FAKE(cuMemGetInfo);
	result = cuMemGetInfo_v2(&left, &all);
	if (result != CUDA_SUCCESS)
		return result;
	if (free_bytes)
		*free_bytes = left > UINT32_MAX ? UINT32_MAX : (unsigned int)left;
	if (total)
		*total = all > UINT32_MAX ? UINT32_MAX : (unsigned int)all;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
	size_t all;
	CUresult result;

	FAKE(cuDeviceTotalMem);
	result = cuDeviceTotalMem_v2(&all, device);
	if (result == CUDA_SUCCESS)
		*bytes = all > UINT32_MAX ? UINT32_MAX : (unsigned int)all;
	return result;
}

FAKE_EXPORT cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	FAKE(cuDeviceTotalMem_v2);
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (device < 0 || device >= fake_devices())
		return CUDA_ERROR_INVALID_DEVICE;
	*bytes = capacity();
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	struct range *range;
	CUresult result = CUDA_ERROR_NOT_FOUND;

	FAKE(cuMemGetAddressRange_v2);
	pthread_mutex_lock(&lock);
	range = containing(allocations, dptr);
	if (!range)
		range = containing(mappings, dptr);
	if (range) {
		if (pbase)
			*pbase = range->start;
		if (psize)
			*psize = range->bytes;
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

/* As the driver answers: for mapped memory, about where it is; RANGE_* is "the address of the mappable address
 * range". */
static CUresult attribute_of(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	const struct range *reserved = containing(reservations, ptr);
	struct range *range = containing(allocations, ptr), *mapping = containing(mappings, ptr);
	const bool host = range ? range->host :
				  mapping && mapping->memory->prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE;

	if (!range && !mapping)
		return CUDA_ERROR_INVALID_VALUE;
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)data = range && !range->pool ? range->context : NULL;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)data = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)data = ptr;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		*(void **)data = host ? (void *)ptr : NULL;
		return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)data = range ? range->id : 0;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(bool *)data = range && range->managed;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)data = range ? range->device : host ? -1 : mapping->memory->prop.location.id;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(bool *)data = range != NULL;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)data = range ? range->start : reserved->start;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)data = range ? range->bytes : reserved->bytes;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		*(CUmemoryPool *)data = range ? range->pool : NULL;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
		*(unsigned long long *)data = range ? range->id : (uintptr_t)mapping->memory;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

FAKE_EXPORT cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	FAKE(cuPointerGetAttribute);
	if (!data)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	CUresult result = attribute_of(data, attribute, ptr);
	pthread_mutex_unlock(&lock);
	return result;
}

FAKE_EXPORT cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)
{
	FAKE(cuPointerGetAttributes);
	pthread_mutex_lock(&lock);
	for (unsigned int i = 0; i < count; i++)
		if (attribute_of(data[i], attributes[i], ptr) != CUDA_SUCCESS)
			memset(data[i], 0,
			       attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED ||
			       attributes[i] == CU_POINTER_ATTRIBUTE_MAPPED ? sizeof(bool) : 4);
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr)
{
	FAKE(cuIpcGetMemHandle);
	pthread_mutex_lock(&lock);
	struct range *range = containing(allocations, dptr);
	pthread_mutex_unlock(&lock);
	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	memset(handle, 0, sizeof(*handle));
	memcpy(handle, &dptr, sizeof(dptr));
	return CUDA_SUCCESS;
}

/* Copies and fills */

/* Rows of bytes to be copied, or filled with a value. */
struct transfer {
	uint64_t to, from, to_pitch, from_pitch, width, rows;
	uint64_t to_slice, from_slice, slices;
	uint64_t value;
	unsigned int element;	/* of a fill, bytes; 0: a copy */
	bool can_hang;
	int way;		/* enum way */
	struct range *noted[2];
};

/* Over the bus. */
enum way { TO_HOST, TO_GPU, WAYS, NEITHER = WAYS };

static bool held; /* atomically: copies of whole chunks hang */

/* Asynchronous copies of whole chunks do not end from now on, as if the GPU were taken away; or they do
 * again. Not of the real driver. */
__attribute__((visibility("default"))) void fake_memory_hold(bool hold)
{
	__atomic_store_n(&held, hold, __ATOMIC_RELEASE);
}

/* Asynchronous copies over the bus, each way: bytes that were submitted, and that have come; how many more may run,
 * then they hang. Not of the real driver. */
static struct {
	uint64_t submitted, carried, may;	/* atomically */
} bus[WAYS] = { { .may = UINT64_MAX }, { .may = UINT64_MAX } };

__attribute__((visibility("default"))) void fake_memory_let(int way, uint64_t copies)
{
	__atomic_store_n(&bus[way].may, copies, __ATOMIC_RELEASE);
}

__attribute__((visibility("default"))) uint64_t fake_memory_submitted(int way)
{
	return __atomic_load_n(&bus[way].submitted, __ATOMIC_ACQUIRE);
}

__attribute__((visibility("default"))) uint64_t fake_memory_carried(int way)
{
	return __atomic_load_n(&bus[way].carried, __ATOMIC_ACQUIRE);
}

/* Whether a copy that way may run: it is one less then. */
static bool may_run(int way)
{
	uint64_t may = __atomic_load_n(&bus[way].may, __ATOMIC_ACQUIRE);

	while (may && may != UINT64_MAX)
		if (__atomic_compare_exchange_n(&bus[way].may, &may, may - 1, false, __ATOMIC_ACQ_REL,
						__ATOMIC_ACQUIRE))
			break;
	return may;
}

/* The file behind an address, and how far it goes on there; 0 bytes: none that is mapped. */
struct piece {
	int fd;
	off_t offset;
	uint64_t bytes;
};

static struct piece piece_at(uint64_t address)
{
	struct piece piece = { .fd = -1 };

	pthread_mutex_lock(&lock);
	const struct range *range = containing(mappings, address);

	if (range)
		piece = (struct piece){
			.fd = range->memory->fd,
			.offset = range->memory->offset + (off_t)(range->offset + address - range->start),
			.bytes = range->start + range->bytes - address,
		};
	pthread_mutex_unlock(&lock);
	return piece;
}

/* The first offset of data (SEEK_DATA) or of a hole (SEEK_HOLE) from there on; where there is none, the end of the
 * piece. */
static off_t next_of(const struct piece *piece, off_t at, uint64_t bytes, int what)
{
	const off_t end = piece->offset + (off_t)bytes, found = lseek(piece->fd, at, what);

	if (found < 0 && errno != ENXIO)
		fake_die("lseek: %s", strerror(errno));
	return found < 0 || found > end ? end : found;
}

static void empty(const struct piece *piece, off_t from, off_t end)
{
	if (from < end && next_of(piece, from, (uint64_t)(end - piece->offset), SEEK_DATA) < end &&
	    fallocate(piece->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, end - from))
		fake_die("fallocate: %s", strerror(errno));
}

/* ThreadSanitizer is to see the bytes that are copied. */
#ifdef __SANITIZE_THREAD__
#define COPIES_BY_FILE false
#else
#define COPIES_BY_FILE true
#endif

/* By the file, where that takes one call: it makes pages for less than a fault each. */
static void copy_data(const struct piece *target, uint64_t to, uint64_t from, uint64_t at, uint64_t bytes)
{
	if (!COPIES_BY_FILE ||
	    pwrite(target->fd, (void *)(from + at), bytes, target->offset + (off_t)at) != (ssize_t)bytes)
		memmove((void *)(to + at), (void *)(from + at), bytes);
}

/* Of chunks: pages that were never written are holes at both ends then, which is what most of them are, so that neither
 * has to be made. Faults as a copy of all bytes does: all of a mapping is accessible, or nothing. */
static void carry_chunks(uint64_t to, uint64_t from, uint64_t bytes)
{
	while (bytes) {
		const struct piece source = piece_at(from), target = piece_at(to);
		uint64_t part = source.bytes < target.bytes ? source.bytes : target.bytes;

		part = part < bytes ? part : bytes;
		if (!part || (source.fd == target.fd && source.offset < target.offset + (off_t)part &&
			      target.offset < source.offset + (off_t)part)) {
			memmove((void *)to, (void *)from, bytes);
			return;
		}
		*(volatile uint8_t *)to = *(volatile uint8_t *)from;
		for (off_t at = source.offset, end = source.offset + (off_t)part; at < end;) {
			const off_t data = next_of(&source, at, part, SEEK_DATA);
			const off_t hole = data < end ? next_of(&source, data, part, SEEK_HOLE) : end;

			empty(&target, target.offset + (at - source.offset), target.offset + (data - source.offset));
			copy_data(&target, to, from, (uint64_t)(data - source.offset), (uint64_t)(hole - data));
			at = hole;
		}
		to += part;
		from += part;
		bytes -= part;
	}
}

static void carry_out(void *argument)
{
	const struct transfer *transfer = argument;

	while (transfer->way != NEITHER && !may_run(transfer->way))
		usleep(1000);
	while (transfer->can_hang && __atomic_load_n(&held, __ATOMIC_ACQUIRE))
		usleep(1000);
	if (transfer->way != NEITHER && fake_timed())
		fake_timed_copy(transfer->way, transfer->width);
	else if (transfer->can_hang && transfer->noted[0] && transfer->noted[1] &&
		 transfer->rows * transfer->slices == 1)
		carry_chunks(transfer->to, transfer->from, transfer->width);
	else for (uint64_t slice = 0; slice < transfer->slices; slice++)
		for (uint64_t row = 0; row < transfer->rows; row++) {
			uint8_t *to = (uint8_t *)(transfer->to + slice * transfer->to_slice + row * transfer->to_pitch);

			if (!transfer->element)
				memmove(to, (void *)(transfer->from + slice * transfer->from_slice +
						     row * transfer->from_pitch), transfer->width);
			for (uint64_t at = 0; transfer->element && at < transfer->width; at += transfer->element)
				memcpy(to + at, &transfer->value, transfer->element);
		}
	if (transfer->way != NEITHER)
		__atomic_add_fetch(&bus[transfer->way].carried, transfer->width, __ATOMIC_RELEASE);
}

/* Of a copy of chunks. With the lock. */
static int way_of(const struct transfer *transfer)
{
	const struct range *from = containing(mappings, transfer->from), *to = containing(mappings, transfer->to);

	if (!transfer->can_hang || !from || !to || from->memory->prop.location.type == to->memory->prop.location.type)
		return NEITHER;
	return to->memory->prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE ? TO_GPU : TO_HOST;
}

static void done(void *argument)
{
	struct transfer *transfer = argument;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < 2; i++)
		if (transfer->noted[i])
			drop(&copies, transfer->noted[i]);
	pthread_mutex_unlock(&lock);
	free(transfer);
}

/* What is reserved, and used by a copy, is mapped: it may have no contents. With the lock. */
static void must_be_mapped(uint64_t start, uint64_t bytes)
{
	for (uint64_t at = start; at < start + bytes;) {
		const struct range *range = containing(mappings, at);

		if (!range && !containing(reservations, at))
			return;
		if (!range || !range->accessible)
			fake_die("a copy of %llx: nothing is mapped there", (unsigned long long)at);
		at = range->start + range->bytes;
	}
}

/* While it is queued, its ends stay mapped (a copy that is captured is not noted). */
static void note(struct transfer *transfer)
{
	const uint64_t to = (transfer->slices - 1) * transfer->to_slice + (transfer->rows - 1) * transfer->to_pitch +
		transfer->width;
	const uint64_t from = (transfer->slices - 1) * transfer->from_slice +
			      (transfer->rows - 1) * transfer->from_pitch + transfer->width;

	pthread_mutex_lock(&lock);
	must_be_mapped(transfer->to, to);
	if (!transfer->element)
		must_be_mapped(transfer->from, from);
	transfer->way = way_of(transfer);
	if (transfer->way != NEITHER)
		__atomic_add_fetch(&bus[transfer->way].submitted, transfer->width, __ATOMIC_RELEASE);
	transfer->noted[0] = add(&copies, transfer->to, to);
	if (!transfer->element)
		transfer->noted[1] = add(&copies, transfer->from, from);
	pthread_mutex_unlock(&lock);
}

static CUresult submit(struct transfer wanted, CUstream handle, bool per_thread, bool wait)
{
	struct fake_stream *stream;
	struct transfer *transfer;
	CUresult result;

	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!wanted.width || !wanted.rows || !wanted.slices)
		return CUDA_SUCCESS;
	if (!wanted.to || (!wanted.element && !wanted.from))
		return CUDA_ERROR_INVALID_VALUE;
	stream = fake_stream(handle, per_thread);
	if (wait && fake_capturing(stream))
		return fake_unsafe() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	transfer = malloc(sizeof(*transfer));
	if (!transfer)
		fake_die("out of memory");
	*transfer = wanted;
	transfer->way = NEITHER;
	transfer->can_hang = !wait && !wanted.element && wanted.width % GRANULE == 0;
	if (!fake_capturing(stream))
		note(transfer);
	result = fake_enqueue(stream, wanted.element ? CU_GRAPH_NODE_TYPE_MEMSET : CU_GRAPH_NODE_TYPE_MEMCPY, carry_out,
			      transfer, done);
	if (result == CUDA_SUCCESS && wait)
		fake_drain_stream(stream);
	return result;
}

#define LINE(destination, source, bytes) \
	((struct transfer){ .to = (uint64_t)(destination), .from = (uint64_t)(source), .width = (bytes), .rows = 1, \
			    .slices = 1 })

/* A synchronous copy in both its forms. */
#define COPY(name, parameters, transfer)			\
	FAKE_EXPORT name parameters				\
	{							\
		FAKE(name);					\
		return submit(transfer, NULL, false, true);	\
	}							\
	FAKE_EXPORT name##_ptds parameters			\
	{							\
		FAKE(name##_ptds);				\
		return submit(transfer, NULL, true, true);	\
	}

/* An asynchronous one. */
#define COPY_ASYNC(name, parameters, transfer)			\
	FAKE_EXPORT name parameters				\
	{							\
		FAKE(name);					\
		return submit(transfer, stream, false, false);	\
	}							\
	FAKE_EXPORT name##_ptsz parameters			\
	{							\
		FAKE(name##_ptsz);				\
		return submit(transfer, stream, true, false);	\
	}

COPY(cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), LINE(dst, src, bytes))
COPY(cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t bytes), LINE(dst, src, bytes))
COPY(cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t bytes), LINE(dst, src, bytes))
COPY(cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), LINE(dst, src, bytes))
COPY(cuMemcpyPeer, (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t bytes),
     ((void)to, (void)from, LINE(dst, src, bytes)))
COPY_ASYNC(cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream), LINE(dst, src, bytes))
COPY_ASYNC(cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream),
	   LINE(dst, src, bytes))
COPY_ASYNC(cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream), LINE(dst, src, bytes))
COPY_ASYNC(cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream),
	   LINE(dst, src, bytes))
COPY_ASYNC(cuMemcpyPeerAsync,
	   (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t bytes, CUstream stream),
	   ((void)to, (void)from, LINE(dst, src, bytes)))

/* Where an end of a copy of several rows is. CUDA_MEMCPY2D and _3D have the same names for it. */
#define END(copy, end)											\
	((copy)->end##MemoryType == CU_MEMORYTYPE_HOST ? (uint64_t)(uintptr_t)(copy)->end##Host :		\
	 (copy)->end##MemoryType == CU_MEMORYTYPE_ARRAY ? (uint64_t)(copy)->end##Array->data :			\
	 (uint64_t)(copy)->end##Device)
#define END_PITCH(copy, end)										\
	((copy)->end##MemoryType == CU_MEMORYTYPE_ARRAY ? (copy)->end##Array->width :			\
	 (copy)->end##Pitch ? (copy)->end##Pitch : (copy)->WidthInBytes)

static struct transfer flat(const CUDA_MEMCPY2D *copy)
{
	return (struct transfer){
		.to = END(copy, dst) + copy->dstY * END_PITCH(copy, dst) + copy->dstXInBytes,
		.from = END(copy, src) + copy->srcY * END_PITCH(copy, src) + copy->srcXInBytes,
		.to_pitch = END_PITCH(copy, dst), .from_pitch = END_PITCH(copy, src),
		.width = copy->WidthInBytes, .rows = copy->Height, .slices = 1,
	};
}

static struct transfer deep(const CUDA_MEMCPY3D *copy)
{
	const uint64_t to_slice = END_PITCH(copy, dst) * copy->dstHeight,
		       from_slice = END_PITCH(copy, src) * copy->srcHeight;

	return (struct transfer){
		.to = END(copy, dst) + copy->dstZ * to_slice + copy->dstY * END_PITCH(copy, dst) + copy->dstXInBytes,
		.from = END(copy, src) + copy->srcZ * from_slice + copy->srcY * END_PITCH(copy, src) +
			copy->srcXInBytes,
		.to_pitch = END_PITCH(copy, dst), .from_pitch = END_PITCH(copy, src), .to_slice = to_slice,
		.from_slice = from_slice, .width = copy->WidthInBytes, .rows = copy->Height, .slices = copy->Depth,
	};
}

COPY(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *copy), flat(copy))
COPY(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *copy), flat(copy))
COPY_ASYNC(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream), flat(copy))
COPY(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *copy), deep(copy))
COPY_ASYNC(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *copy, CUstream stream), deep(copy))

static struct transfer fill(CUdeviceptr to, uint64_t value, unsigned int element, size_t pitch, size_t width,
			    size_t rows)
{
	return (struct transfer){ .to = to, .value = value, .element = element, .to_pitch = pitch,
				  .width = width * element, .rows = rows, .slices = 1 };
}

/* cuMemsetD8_v2, but cuMemsetD8Async. */
#define FILL(bits, type)										\
	COPY(cuMemsetD##bits##_v2, (CUdeviceptr dst, type value, size_t count),			\
	     fill(dst, value, (bits) / 8, 0, count, 1))							\
	COPY_ASYNC(cuMemsetD##bits##Async, (CUdeviceptr dst, type value, size_t count, CUstream stream),	\
		   fill(dst, value, (bits) / 8, 0, count, 1))						\
	COPY(cuMemsetD2D##bits##_v2, (CUdeviceptr dst, size_t pitch, type value, size_t width, size_t height),	\
	     fill(dst, value, (bits) / 8, pitch, width, height))						\
	COPY_ASYNC(cuMemsetD2D##bits##Async,								\
		   (CUdeviceptr dst, size_t pitch, type value, size_t width, size_t height, CUstream stream), \
		   fill(dst, value, (bits) / 8, pitch, width, height))

FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned int)

static CUresult batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUstream stream,
		      bool per_thread)
{
	CUresult result = CUDA_SUCCESS;

	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = submit(LINE(dsts[i], srcs[i], sizes[i]), stream, per_thread, false);
	return result;
}

FAKE_EXPORT cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
				  CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream stream)
{
	FAKE(cuMemcpyBatchAsync_v2);
	if (!attrs || !attrsIdxs || !numAttrs)
		return CUDA_ERROR_INVALID_VALUE;
	return batch(dsts, srcs, sizes, count, stream, false);
}

/* Stream-ordered allocation */

static void number_pools(void)
{
	for (CUdevice device = 0; device < DEVICES; device++)
		default_pools[device].device = device;
}

static CUmemoryPool default_pool(CUdevice device)
{
	static pthread_once_t numbered = PTHREAD_ONCE_INIT;

	pthread_once(&numbered, number_pools);
	return &default_pools[device];
}

FAKE_EXPORT cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
	FAKE(cuDeviceGetDefaultMemPool);
	*pool = default_pool(device);
	return CUDA_SUCCESS;
}

static CUmemoryPool current_pool(CUdevice device)
{
	CUmemoryPool pool;

	pthread_mutex_lock(&lock);
	pool = current_pools[device] ? current_pools[device] : default_pool(device);
	pthread_mutex_unlock(&lock);
	return pool;
}

FAKE_EXPORT cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
	FAKE(cuDeviceGetMemPool);
	*pool = current_pool(device);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
	FAKE(cuDeviceSetMemPool);
	pthread_mutex_lock(&lock);
	current_pools[device] = pool;
	pthread_mutex_unlock(&lock);
	return CUDA_SUCCESS;
}

static void nothing(void *argument)
{
	(void)argument;
}

static CUresult allocate_async(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream handle, bool per_thread)
{
	struct fake_stream *stream;
	CUresult result;

	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	stream = fake_stream(handle, per_thread);
	if (!pool)
		pool = current_pool(fake_device_of(fake_context()));
	result = fake_allocate(ptr, bytes, fake_capturing(stream) ? FAKE_OF_GRAPH : FAKE_PLAIN, pool);
	if (result == CUDA_SUCCESS)
		result = fake_enqueue(stream, CU_GRAPH_NODE_TYPE_MEM_ALLOC, nothing, NULL, NULL);
	return result;
}

/* What a graph has allocated is there again at its next launch, and counted nowhere. */
static void free_now(void *argument)
{
	pthread_mutex_lock(&lock);
	struct range *range = containing(allocations, (uintptr_t)argument);

	if (!range->graph)
		deallocate(range);
	pthread_mutex_unlock(&lock);
}

static CUresult free_async(CUdeviceptr ptr, CUstream handle, bool per_thread)
{
	struct range *range;

	pthread_mutex_lock(&lock);
	range = containing(allocations, ptr);
	if (range && (range->start != ptr || !range->pool))
		range = NULL;
	pthread_mutex_unlock(&lock);
	if (!range)
		return CUDA_ERROR_INVALID_VALUE;
	return fake_enqueue(fake_stream(handle, per_thread), CU_GRAPH_NODE_TYPE_MEM_FREE, free_now, (void *)ptr, NULL);
}

#define ORDERED(suffix, per_thread)										\
	FAKE_EXPORT cuMemAllocAsync##suffix(CUdeviceptr *dptr, size_t bytesize, CUstream stream)		\
	{													\
		FAKE(cuMemAllocAsync##suffix);									\
		return allocate_async(dptr, bytesize, NULL, stream, per_thread);				\
	}													\
	FAKE_EXPORT cuMemAllocFromPoolAsync##suffix(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,	\
						    CUstream stream)						\
	{													\
		FAKE(cuMemAllocFromPoolAsync##suffix);								\
		return allocate_async(dptr, bytesize, pool, stream, per_thread);				\
	}													\
	FAKE_EXPORT cuMemFreeAsync##suffix(CUdeviceptr dptr, CUstream stream)					\
	{													\
		FAKE(cuMemFreeAsync##suffix);									\
		return free_async(dptr, stream, per_thread);							\
	}

ORDERED(, false)
ORDERED(_ptsz, true)

/* Other GPUs, and numbers of streams */

FAKE_EXPORT cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	FAKE(cuCtxEnablePeerAccess);
	if (flags || !fake_context())
		return CUDA_ERROR_INVALID_VALUE;
	return fake_device_of(peer) == fake_device_of(fake_context()) ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

FAKE_EXPORT cuCtxDisablePeerAccess(CUcontext peer)
{
	FAKE(cuCtxDisablePeerAccess);
	(void)peer;
	return CUDA_SUCCESS;
}

/* Whether `device` can use what is mapped at `address`. Not of the real driver. */
__attribute__((visibility("default"))) bool fake_memory_accessible(CUdeviceptr address, CUdevice device)
{
	pthread_mutex_lock(&lock);
	struct range *range = containing(mappings, address);
	bool accessible = range && (range->accessible & UINT64_C(1) << device);
	pthread_mutex_unlock(&lock);
	return accessible;
}

/* Streams are never freed by the double: their addresses are as good as numbers. */
FAKE_EXPORT cuStreamGetId(CUstream stream, unsigned long long *number)
{
	FAKE(cuStreamGetId);
	*number = (uintptr_t)fake_stream(stream, false);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuStreamGetId_ptsz(CUstream stream, unsigned long long *number)
{
	FAKE(cuStreamGetId_ptsz);
	*number = (uintptr_t)fake_stream(stream, true);
	return CUDA_SUCCESS;
}
