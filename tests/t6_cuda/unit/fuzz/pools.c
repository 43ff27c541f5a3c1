// SPDX-License-Identifier: Apache-2.0
/* Allocations in streams, from the default pool and from the program's own pools; and those pools. */
#include "pools.h"

#include <unistd.h>

#include "calls.h"
#include "steps.h"

#define POOLS 4

/*
 * Kinds of the program's own pools: served by the library until another GPU gets access; or shareable; or imported,
 * which is another name for the memory of another pool.
 */
enum own_kind { SERVED, GIVEN, SHAREABLE, IMPORT };
static struct own {
	CUmemoryPool pool;	/* NULL: none */
	enum own_kind kind;
} pools[POOLS];

CUmemoryPool pools_default(void)
{
	static CUmemoryPool pool;

	if (!pool)
		CHECK(real.cuDeviceGetDefaultMemPool(&pool, model.device->ordinal) == CUDA_SUCCESS);
	return pool;
}

/* Return a random pool between two kinds; NULL if there is none. */
static struct own *any_pool(enum own_kind from, enum own_kind to)
{
	for (size_t i = 0, first = model_any(POOLS); i < POOLS; i++) {
		struct own *own = &pools[(first + i) % POOLS];

		if (own->pool && own->kind >= from && own->kind <= to)
			return own;
	}
	return NULL;
}

static struct own *free_pool(void)
{
	for (struct own *own = pools; own < pools + POOLS; own++)
		if (!own->pool)
			return own;
	return NULL;
}

/* Return 0 for the stream that all share, or the thread's own stream, which the name of an entry point selects. */
static CUstream any_stream(void)
{
	const size_t number = model_any(3);

	return number < 2 ? model.streams[number] : NULL;
}

/* Allocate by each entry point in turn: each has a dozen calls of the driver that must fail once. */
static void alloc_default(struct plain *plain)
{
	static unsigned int turn;
	const CUstream stream = any_stream();
	const CUmemoryPool pool = pools_default();
	CUdeviceptr address;

	switch (turn++ % 4) {
	case 0:
		DO(cuMemAllocAsync, (&address, plain->bytes, stream));
		break;
	case 1:
		DO(cuMemAllocAsync_ptsz, (&address, plain->bytes, stream));
		break;
	case 2:
		DO(cuMemAllocFromPoolAsync, (&address, plain->bytes, pool, stream));
		break;
	default:
		DO(cuMemAllocFromPoolAsync_ptsz, (&address, plain->bytes, pool, stream));
	}
	plain->address = address;
}

static void alloc_own(struct plain *plain, const struct own *own)
{
	const CUmemoryPool pool = own->pool;
	const CUstream stream = any_stream();
	CUdeviceptr address;

	if (model_any(2))
		DO(cuMemAllocFromPoolAsync, (&address, plain->bytes, pool, stream));
	else
		DO(cuMemAllocFromPoolAsync_ptsz, (&address, plain->bytes, pool, stream));
	CHECK(real.cuStreamSynchronize(stream) == CUDA_SUCCESS);
	plain->kind = own->kind == SERVED ? OWN : OF_POOL;
	plain->pool = (size_t)(own - pools);
	plain->address = address;
}

void pools_alloc(void)
{
	struct plain *plain = model_free_plain();
	const struct own *own = model_any(3) ? NULL : any_pool(SERVED, SHAREABLE);

	if (!plain)
		return;
	/* The double of the driver counts pools in whole pages. */
	*plain = (struct plain){ .kind = STREAMED, .bytes = (1 + model_any(8)) * PAGE };
	if (own)
		alloc_own(plain, own);
	else
		alloc_default(plain);
}

void pools_free(struct plain *plain)
{
	const CUstream stream = any_stream();

	if (model_any(2))
		DO(cuMemFreeAsync, (plain->address, stream));
	else
		DO(cuMemFreeAsync_ptsz, (plain->address, stream));
	plain->address = 0;
}

void pools_make(void)
{
	const enum own_kind kind = model_any(2) ? SERVED : SHAREABLE;
	const CUmemPoolProps props = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
				       .handleTypes = kind == SHAREABLE ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR :
									  CU_MEM_HANDLE_TYPE_NONE,
				       .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE } };
	struct own *own = free_pool();

	if (!own)
		return;
	DO(cuMemPoolCreate, (&own->pool, &props));
	own->kind = kind;
}

/* Return the bytes allocated from a pool that the library serves. */
static cuuint64_t used_of(const struct own *own)
{
	cuuint64_t used = 0;

	for (size_t i = 0; i < PLAINS; i++)
		if (model.plains[i].address && model.plains[i].kind == OWN && &pools[model.plains[i].pool] == own)
			used += model.plains[i].bytes;
	return used;
}

/* Destroy a served pool; its allocations outlive it. */
static void destroy_served(struct own *own)
{
	DO(cuMemPoolDestroy, (own->pool));
	own->pool = NULL;
	for (size_t i = 0; i < PLAINS; i++)
		if (model.plains[i].kind == OWN && &pools[model.plains[i].pool] == own)
			model.plains[i].pool = POOLS;
}

/* Destroy the pools once nothing of them is allocated: otherwise the double of the driver ends the test. */
void pools_destroy(void)
{
	struct own *own = any_pool(SERVED, IMPORT);
	cuuint64_t used = 0;

	if (!own || (free_pool() && model_any(4)))
		return;
	if (own->kind == SERVED) {
		destroy_served(own);
		return;
	}
	for (size_t i = 0; i < PLAINS; i++)
		if (model.plains[i].address && (model.plains[i].kind == OWN || model.plains[i].kind >= OF_POOL) &&
		    &pools[model.plains[i].pool] == own)
			return;
	CHECK(real.cuCtxSynchronize() == CUDA_SUCCESS);
	DO(cuMemPoolGetAttribute, (own->pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
	CHECK(!used);
	DO(cuMemPoolDestroy, (own->pool));
	own->pool = NULL;
}

/* Share a pool by a descriptor, and an allocation of it by a pointer. */
void pools_share(void)
{
	struct own *own = any_pool(SHAREABLE, SHAREABLE), *other = free_pool();
	struct plain *of = NULL, *plain = model_free_plain();
	CUmemPoolPtrExportData data;
	int fd = -1;

	if (own && other) {
		DO(cuMemPoolExportToShareableHandle, (&fd, own->pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
		DO(cuMemPoolImportFromShareableHandle,
		   (&other->pool, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
		other->kind = IMPORT;
		close(fd);
	}
	other = any_pool(IMPORT, IMPORT);
	for (size_t i = 0; i < PLAINS && !of; i++)
		of = model.plains[i].address && model.plains[i].kind == OF_POOL &&
		     pools[model.plains[i].pool].kind == SHAREABLE ?
			     &model.plains[i] : NULL;
	if (!other || !of || !plain)
		return;
	*plain = (struct plain){ .kind = IMPORTED, .bytes = of->bytes, .pool = (size_t)(other - pools) };
	DO(cuMemPoolExportPointer, (&data, of->address));
	DO(cuMemPoolImportPointer, (&plain->address, other->pool, &data));
}

/*
 * Return whether nothing of it is allocated, or waits to be freed: otherwise all of that would stay on the GPU for
 * good.
 */
static bool may_be_given(const struct own *own)
{
	cuuint64_t reserved = 1;

	if (used_of(own) || model_any(3))
		return false;
	CHECK(real.cuCtxSynchronize() == CUDA_SUCCESS);
	CHECK(cuMemPoolTrimTo(own->pool, 0) == CUDA_SUCCESS);
	CHECK(cuMemPoolGetAttribute(own->pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) == CUDA_SUCCESS);
	return !reserved;
}

/* Set the threshold of one of the program's own pools, and access for another GPU; and trim it. */
void pools_tell(void)
{
	const CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1 },
					 .flags = model_any(2) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE :
								 CU_MEM_ACCESS_FLAGS_PROT_READ };
	CUmemLocation location = access.location;
	cuuint64_t threshold = model_any(64) * PAGE, got = 0;
	struct own *own = any_pool(SERVED, SHAREABLE);
	CUmemAccess_flags flags = 0;

	if (own && own->kind == SERVED && !may_be_given(own))
		own = NULL;
	if (own) {
		DO(cuMemPoolSetAttribute, (own->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
		DO(cuMemPoolGetAttribute, (own->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &got));
		DO(cuMemPoolSetAccess, (own->pool, &access, 1));
		DO(cuMemPoolGetAccess, (&flags, own->pool, &location));
		CHECK(got == threshold && flags == access.flags);
		own->kind = own->kind == SERVED ? GIVEN : own->kind;
	}
	DO(cuMemPoolTrimTo, (pools_default(), model_any(2) ? 0 : PAGE * model_any(32)));
}

static void ask_served(const struct own *own)
{
	cuuint64_t used = 0, most = 0, zero = 0;
	CUmemoryPool pool;

	DO(cuMemPoolGetAttribute, (own->pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
	DO(cuMemPoolGetAttribute, (own->pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &most));
	CHECK(used == used_of(own) && most >= used);
	DO(cuMemPoolSetAttribute, (own->pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &zero));
	DO(cuMemPoolGetAttribute, (own->pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &most));
	CHECK(most == used);
	for (size_t i = 0; i < PLAINS; i++) {
		const struct plain *plain = &model.plains[i];

		if (!plain->address || plain->kind != OWN || &pools[plain->pool] != own)
			continue;
		CHECK(cuPointerGetAttribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, plain->address) ==
		      CUDA_SUCCESS);
		CHECK(pool == own->pool);
	}
}

void pools_ask(void)
{
	const struct own *own = any_pool(SERVED, SERVED);
	cuuint64_t used = 0, reserved = 0, is = 0;

	DO(cuMemPoolGetAttribute, (pools_default(), CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
	DO(cuMemPoolGetAttribute, (pools_default(), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
	for (size_t i = 0; i < PLAINS; i++)
		is += model.plains[i].address && model.plains[i].kind == STREAMED ? model.plains[i].bytes : 0;
	CHECK(used >= is && reserved >= used);
	if (own)
		ask_served(own);
}

void pools_end(void)
{
	CHECK(real.cuCtxSynchronize() == CUDA_SUCCESS);
	for (struct own *own = pools; own < pools + POOLS; own++)
		if (own->pool)
			DO(cuMemPoolDestroy, (own->pool));
	DO(cuMemPoolTrimTo, (pools_default(), 0));
}
