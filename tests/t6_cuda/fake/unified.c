// SPDX-License-Identifier: Apache-2.0
/* Managed memory: advice, prefetches, and where each page is. A prefetch is done as it is asked for, and takes
 * FAKE_PREFETCH_US. */

#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"

#define PAGE 4096
#define NOWHERE (-3)
#define IN_HOST CU_DEVICE_CPU

struct page {
	bool mostly_read, prefers, by_host, fetched;
	CUmemLocation preferred, last;
	uint64_t by;
	int where;		/* NOWHERE, IN_HOST, or the number of a GPU */
};

/* What is known of one allocation, from the first call about it on. */
struct pages {
	struct pages *next;
	CUdeviceptr start;
	unsigned long long id;
	size_t count;
	struct page page[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pages *all;

/* The pages of a range, with the lock; NULL: it is not within managed memory. */
static struct page *pages_of(CUdeviceptr address, size_t bytes, size_t *count)
{
	uint64_t start, size, id;
	struct pages *pages;
	size_t first;

	if (!bytes || !fake_managed(address, &start, &size, &id))
		return NULL;
	size = (size + PAGE - 1) / PAGE;
	for (pages = all; pages && pages->id != id; pages = pages->next)
		;
	if (!pages) {
		pages = calloc(1, sizeof(*pages) + size * sizeof(pages->page[0]));
		pages->start = start;
		pages->id = id;
		pages->count = size;
		for (size_t i = 0; i < size; i++)
			pages->page[i].where = NOWHERE;
		pages->next = all;
		all = pages;
	}
	first = (address - start) / PAGE;
	*count = (address + bytes - start + PAGE - 1) / PAGE - first;
	return first + *count <= size ? &pages->page[first] : NULL;
}

static bool is_place(const CUmemLocation *location)
{
	return location->type == CU_MEM_LOCATION_TYPE_HOST ||
	       (location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id >= 0 &&
		(uint64_t)location->id < fake_number("FAKE_DEVICES", 1));
}

static void note(struct page *page, CUmem_advise advice, const CUmemLocation *location)
{
	const bool is_gpu = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
	const uint64_t bit = is_gpu ? UINT64_C(1) << location->id : 0;

	switch (advice) {
	case CU_MEM_ADVISE_SET_READ_MOSTLY: page->mostly_read = true; break;
	case CU_MEM_ADVISE_UNSET_READ_MOSTLY: page->mostly_read = false; break;
	case CU_MEM_ADVISE_SET_PREFERRED_LOCATION: page->prefers = true; page->preferred = *location; break;
	case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: page->prefers = false; break;
	case CU_MEM_ADVISE_SET_ACCESSED_BY: page->by |= bit; page->by_host |= !is_gpu; break;
	case CU_MEM_ADVISE_UNSET_ACCESSED_BY: page->by &= ~bit; page->by_host &= is_gpu; break;
	}
}

FAKE_EXPORT cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)
{
	const bool anywhere = advice == CU_MEM_ADVISE_SET_READ_MOSTLY || advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY ||
			      advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	struct page *page;
	size_t pages;

	FAKE(cuMemAdvise_v2);
	pthread_mutex_lock(&lock);
	page = pages_of(devPtr, count, &pages);
	if (page && advice >= CU_MEM_ADVISE_SET_READ_MOSTLY && advice <= CU_MEM_ADVISE_UNSET_ACCESSED_BY) {
		result = anywhere || is_place(&location) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
		for (size_t i = 0; !result && i < pages; i++)
			note(&page[i], advice, &location);
	}
	pthread_mutex_unlock(&lock);
	return result;
}

static CUmemLocation location_of(CUdevice device)
{
	return (CUmemLocation){
		.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE,
		.id = device == CU_DEVICE_CPU ? 0 : device,
	};
}

FAKE_EXPORT cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device)
{
	FAKE(cuMemAdvise);
	return cuMemAdvise_v2(devPtr, count, advice, location_of(device));
}

static CUresult prefetch(CUdeviceptr address, size_t bytes, const CUmemLocation *location)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	struct page *page;
	size_t pages;

	usleep((useconds_t)fake_number("FAKE_PREFETCH_US", 0));
	pthread_mutex_lock(&lock);
	page = pages_of(address, bytes, &pages);
	if (page)
		result = is_place(location) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
	for (size_t i = 0; !result && i < pages; i++) {
		page[i].fetched = true;
		page[i].last = *location;
		page[i].where = location->type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id : IN_HOST;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

FAKE_EXPORT cuMemPrefetchAsync_v2(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
				  CUstream hStream)
{
	(void)hStream;
	FAKE(cuMemPrefetchAsync_v2);
	return flags ? CUDA_ERROR_INVALID_VALUE : prefetch(devPtr, count, &location);
}

FAKE_EXPORT cuMemPrefetchAsync_v2_ptsz(CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags,
				       CUstream hStream)
{
	(void)hStream;
	FAKE(cuMemPrefetchAsync_v2_ptsz);
	return flags ? CUDA_ERROR_INVALID_VALUE : prefetch(devPtr, count, &location);
}

FAKE_EXPORT cuMemPrefetchAsync(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
{
	const CUmemLocation location = location_of(dstDevice);

	(void)hStream;
	FAKE(cuMemPrefetchAsync);
	return prefetch(devPtr, count, &location);
}

FAKE_EXPORT cuMemPrefetchAsync_ptsz(CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream)
{
	const CUmemLocation location = location_of(dstDevice);

	(void)hStream;
	FAKE(cuMemPrefetchAsync_ptsz);
	return prefetch(devPtr, count, &location);
}

FAKE_EXPORT cuMemPrefetchBatchAsync(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs,
				    size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags,
				    CUstream hStream)
{
	CUresult result = CUDA_SUCCESS;
	size_t at = 0;

	(void)hStream;
	FAKE(cuMemPrefetchBatchAsync);
	if (!count || !dptrs || !sizes || !prefetchLocs || !prefetchLocIdxs || !numPrefetchLocs || prefetchLocIdxs[0] ||
	    flags)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count && !result; i++) {
		while (at + 1 < numPrefetchLocs && prefetchLocIdxs[at + 1] <= i)
			at++;
		result = prefetch(dptrs[i], sizes[i], &prefetchLocs[at]);
	}
	return result;
}

static int number_of(bool some, const CUmemLocation *location)
{
	return !some ? CU_DEVICE_INVALID : location->type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id : CU_DEVICE_CPU;
}

static bool same(const CUmemLocation *one, const CUmemLocation *other)
{
	return one->type == other->type && (one->type != CU_MEM_LOCATION_TYPE_DEVICE || one->id == other->id);
}

static CUresult attribute_of(const struct page *page, size_t pages, CUmem_range_attribute attribute, int *number,
			     size_t size)
{
	struct page all_of = page[0];
	size_t i = 0;

	for (size_t p = 1; p < pages; p++) {
		all_of.mostly_read &= page[p].mostly_read;
		all_of.prefers &= page[p].prefers && same(&all_of.preferred, &page[p].preferred);
		all_of.fetched &= page[p].fetched && same(&all_of.last, &page[p].last);
		all_of.by &= page[p].by;
		all_of.by_host &= page[p].by_host;
	}
	switch (attribute) {
	case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: *number = all_of.mostly_read; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: *number = number_of(all_of.prefers, &all_of.preferred); break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: *number = number_of(all_of.fetched, &all_of.last); break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
		*number = all_of.prefers ? (int)all_of.preferred.type : 0;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: *number = all_of.prefers ? all_of.preferred.id : 0; break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
		*number = all_of.fetched ? (int)all_of.last.type : 0;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: *number = all_of.fetched ? all_of.last.id : 0; break;
	case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
		size /= sizeof(*number);
		if (all_of.by_host && i < size)
			number[i++] = CU_DEVICE_CPU;
		for (int device = 0; device < 64 && i < size; device++)
			if (all_of.by >> device & 1)
				number[i++] = device;
		while (i < size)
			number[i++] = CU_DEVICE_INVALID;
		break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuMemRangeGetAttribute(void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr,
				   size_t count)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	const struct page *page;
	size_t pages;

	FAKE(cuMemRangeGetAttribute);
	if (!data || dataSize < sizeof(int) || dataSize % sizeof(int) ||
	    (dataSize != sizeof(int) && attribute != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY))
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	page = pages_of(devPtr, count, &pages);
	if (page)
		result = attribute_of(page, pages, attribute, data, dataSize);
	pthread_mutex_unlock(&lock);
	return result;
}

FAKE_EXPORT cuMemRangeGetAttributes(void **data, size_t *dataSizes, CUmem_range_attribute *attributes,
				    size_t numAttributes, CUdeviceptr devPtr, size_t count)
{
	CUresult result = CUDA_SUCCESS;

	FAKE(cuMemRangeGetAttributes);
	if (!data || !dataSizes || !attributes || !numAttributes)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < numAttributes && !result; i++)
		result = cuMemRangeGetAttribute(data[i], dataSizes[i], attributes[i], devPtr, count);
	return result;
}

/* What tests ask: not of the real driver. */

/* A kernel on the GPU uses a range: its pages come, but those that prefer the host and that it may use there. */
__attribute__((visibility("default"))) void fake_managed_touch(CUdeviceptr address, size_t bytes, int device)
{
	struct page *page;
	size_t pages;

	pthread_mutex_lock(&lock);
	page = pages_of(address, bytes, &pages);
	if (!page)
		fake_die("no managed memory at %llx", address);
	for (size_t i = 0; i < pages; i++) {
		const bool stays = page[i].prefers && page[i].preferred.type == CU_MEM_LOCATION_TYPE_HOST &&
				   page[i].by >> device & 1 && !page[i].mostly_read;

		if (page[i].where != device)
			page[i].where = stays ? IN_HOST : device;
	}
	pthread_mutex_unlock(&lock);
}

/* Bytes of a range that are on a GPU. */
__attribute__((visibility("default"))) uint64_t fake_managed_on(CUdeviceptr address, size_t bytes, int device)
{
	const struct page *page;
	uint64_t on = 0;
	size_t pages;

	pthread_mutex_lock(&lock);
	page = pages_of(address, bytes, &pages);
	for (size_t i = 0; page && i < pages; i++)
		on += page[i].where == device ? PAGE : 0;
	pthread_mutex_unlock(&lock);
	return on;
}
