// SPDX-License-Identifier: Apache-2.0
#include "shadow.h"

#include <stdlib.h>
#include <string.h>

/* Bytes of a page of the host, which is what advice is about. */
#define PAGE UINT64_C(4096)

static uint64_t page_end(uint64_t address)
{
	return (address + PAGE - 1) / PAGE * PAGE;
}

bool shadow_begin(struct shadow *shadow, CUdeviceptr start, uint64_t bytes)
{
	*shadow = (struct shadow){
		.start = start, .end = start + page_end(bytes),
		.spans = calloc(1, sizeof(*shadow->spans)), .count = 1, .room = 1,
	};
	if (!shadow->spans)
		return false;
	shadow->spans[0].start = start;
	return true;
}

void shadow_end(struct shadow *shadow)
{
	free(shadow->spans);
}

/* Return the span that has an address. */
static size_t span_at(const struct shadow *shadow, CUdeviceptr address)
{
	size_t i = shadow->count - 1;

	while (i && shadow->spans[i].start > address)
		i--;
	return i;
}

static CUdeviceptr span_end(const struct shadow *shadow, size_t i)
{
	return i + 1 < shadow->count ? shadow->spans[i + 1].start : shadow->end;
}

/* Have a span begin at an address; false without memory. */
static bool split(struct shadow *shadow, CUdeviceptr address)
{
	const size_t i = span_at(shadow, address);
	struct span *more;

	if (shadow->spans[i].start == address || address >= shadow->end)
		return true;
	if (shadow->count == shadow->room) {
		more = realloc(shadow->spans, 2 * shadow->room * sizeof(*more));
		if (!more)
			return false;
		shadow->spans = more;
		shadow->room *= 2;
	}
	memmove(&shadow->spans[i + 2], &shadow->spans[i + 1], (shadow->count - i - 1) * sizeof(*shadow->spans));
	shadow->spans[i + 1] = (struct span){ address, shadow->spans[i].advice };
	shadow->count++;
	return true;
}

bool shadow_within(const struct shadow *shadow, CUdeviceptr *start, CUdeviceptr *end)
{
	*start &= ~(PAGE - 1);
	*end = page_end(*end);
	if (*start < shadow->start)
		*start = shadow->start;
	if (*end > shadow->end)
		*end = shadow->end;
	return *start < *end;
}

/* Call `visit` for the spans of a range, split at its ends. */
static void visit_spans(struct shadow *shadow, CUdeviceptr start, CUdeviceptr end,
			void (*visit)(struct advice *, void *), void *argument)
{
	if (!shadow_within(shadow, &start, &end) || !split(shadow, start) || !split(shadow, end))
		return;
	for (size_t i = span_at(shadow, start); i < shadow->count && shadow->spans[i].start < end; i++)
		visit(&shadow->spans[i].advice, argument);
}

struct noted {
	CUmem_advise what;
	const CUmemLocation *location;
};

static void note_advice(struct advice *advice, void *argument)
{
	const struct noted *noted = argument;
	const CUmemLocation *location = noted->location;
	const bool is_gpu = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
	const uint64_t bit =
		is_gpu && location->id >= 0 && location->id < GG_ORDINALS ? UINT64_C(1) << location->id : 0;

	switch (noted->what) {
	case CU_MEM_ADVISE_SET_READ_MOSTLY: advice->mostly_read = true; break;
	case CU_MEM_ADVISE_UNSET_READ_MOSTLY: advice->mostly_read = false; break;
	case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
		advice->prefers = true;
		advice->preferred = *location;
		break;
	case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: advice->prefers = false; break;
	case CU_MEM_ADVISE_SET_ACCESSED_BY:
		advice->by |= bit;
		advice->by_host |= !is_gpu;
		break;
	case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
		advice->by &= ~bit;
		advice->by_host &= is_gpu;
		break;
	}
}

void shadow_advise(struct shadow *shadow, CUdeviceptr start, CUdeviceptr end, CUmem_advise what,
		   const CUmemLocation *location)
{
	struct noted noted = { what, location };

	visit_spans(shadow, start, end, note_advice, &noted);
}

static void note_fetch(struct advice *advice, void *argument)
{
	const struct noted *noted = argument;

	advice->fetched = true;
	advice->last = *noted->location;
}

void shadow_fetch(struct shadow *shadow, CUdeviceptr start, CUdeviceptr end, const CUmemLocation *location)
{
	struct noted noted = { .location = location };

	visit_spans(shadow, start, end, note_fetch, &noted);
}

CUresult shadow_each(const struct shadow *shadow, CUdeviceptr start, CUdeviceptr end,
		     CUresult (*call)(CUdeviceptr start, uint64_t bytes, const struct advice *, const void *argument),
		     const void *argument)
{
	CUresult result = CUDA_SUCCESS;

	for (size_t i = span_at(shadow, start); !result && start < end; i++) {
		const CUdeviceptr next = span_end(shadow, i), stop = next < end ? next : end;

		result = call(start, stop - start, &shadow->spans[i].advice, argument);
		start = stop;
	}
	return result;
}

/* Attributes */

static bool same_place(const CUmemLocation *one, const CUmemLocation *other)
{
	return one->type == other->type && (one->type == CU_MEM_LOCATION_TYPE_HOST || one->id == other->id);
}

static void agree(struct advice *advice, void *argument)
{
	struct agreed *agreed = argument;

	if (agreed->first)
		*agreed = (struct agreed){
			false, advice->mostly_read, advice->prefers, advice->fetched, advice->by_host,
			advice->preferred, advice->last, advice->by,
		};
	agreed->mostly_read &= advice->mostly_read;
	agreed->prefers &= advice->prefers && same_place(&agreed->preferred, &advice->preferred);
	agreed->fetched &= advice->fetched && same_place(&agreed->last, &advice->last);
	agreed->by_host &= advice->by_host;
	agreed->by &= advice->by;
}

struct agreed shadow_agreed(struct shadow *shadow, CUdeviceptr start, CUdeviceptr end)
{
	struct agreed agreed = { .first = true };

	visit_spans(shadow, start, end, agree, &agreed);
	return agreed;
}

/* Return the number of a place, as the older attributes have it. */
static int number_of(bool some, const CUmemLocation *location)
{
	return !some ? CU_DEVICE_INVALID : location->type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id :
	       location->type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : CU_DEVICE_INVALID;
}

static void list_by(const struct agreed *agreed, int *numbers, size_t count)
{
	size_t i = 0;

	if (agreed->by_host && i < count)
		numbers[i++] = CU_DEVICE_CPU;
	for (int ordinal = 0; ordinal < GG_ORDINALS && i < count; ordinal++)
		if (agreed->by >> ordinal & 1)
			numbers[i++] = ordinal;
	while (i < count)
		numbers[i++] = CU_DEVICE_INVALID;
}

CUresult shadow_answer(const struct agreed *agreed, CUmem_range_attribute attribute, int *number, size_t size)
{
	if (size < sizeof(*number) || size % sizeof(*number) ||
	    (size != sizeof(*number) && attribute != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY))
		return CUDA_ERROR_INVALID_VALUE;
	switch (attribute) {
	case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: *number = agreed->mostly_read; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: *number = number_of(agreed->prefers, &agreed->preferred); break;
	case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: list_by(agreed, number, size / sizeof(*number)); break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: *number = number_of(agreed->fetched, &agreed->last); break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
		*number = agreed->prefers ? (int)agreed->preferred.type : (int)CU_MEM_LOCATION_TYPE_INVALID;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: *number = agreed->prefers ? agreed->preferred.id : 0; break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
		*number = agreed->fetched ? (int)agreed->last.type : (int)CU_MEM_LOCATION_TYPE_INVALID;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: *number = agreed->fetched ? agreed->last.id : 0; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}
