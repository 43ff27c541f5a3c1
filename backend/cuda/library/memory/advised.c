// SPDX-License-Identifier: Apache-2.0
#include "advised.h"

#include "daemon.h"
#include "driver.h"
#include "hint.h"
#include "piece.h"
#include "unified.h"

static bool is_advice(CUmem_advise advice)
{
	return advice >= CU_MEM_ADVISE_SET_READ_MOSTLY && advice <= CU_MEM_ADVISE_UNSET_ACCESSED_BY;
}

static size_t piece_of(const struct unified *unified, CUdeviceptr address)
{
	return (address - unified->start) / UNIFIED_PIECE;
}

static bool is_here(const struct unified *unified, CUdeviceptr address)
{
	return unified->place[piece_of(unified, address)] == UNIFIED_ON_GPU;
}

/* Return where a run of pieces ends that are in the same state. */
static CUdeviceptr run_end(const struct unified *unified, CUdeviceptr address, CUdeviceptr end)
{
	const bool here = is_here(unified, address);
	size_t piece = piece_of(unified, address);
	CUdeviceptr stop;

	while (++piece < unified->count && (unified->place[piece] == UNIFIED_ON_GPU) == here)
		;
	stop = piece < unified->count ? unified_piece(unified, piece) : end;
	return stop < end ? stop : end;
}

bool advised_advise(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location, CUresult *result)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = is_advice(advice) ? unified_own(&address, &end) : NULL;
	CUstreamCaptureMode mode;

	if (!unified)
		return false;
	*result = CUDA_SUCCESS;
	mode = driver_enter();
	for (CUdeviceptr stop; !*result && address < end; address = stop) {
		stop = run_end(unified, address, end);
		/* What the host keeps is to stay there: that is noted, and holds once it may come. */
		if (is_here(unified, address) || advice == CU_MEM_ADVISE_SET_ACCESSED_BY)
			*result = hint_advise(address, stop - address, advice, location);
		if (!*result)
			shadow_advise(&unified->shadow, address, stop, advice, &location);
	}
	driver_leave(mode);
	unified_disown(unified);
	return true;
}

/* A call that the driver took. */
struct taken {
	CUdeviceptr address, end;
	CUmem_advise advice;
	CUmemLocation location;
};

static void note_advice(struct unified *unified, void *argument)
{
	const struct taken *taken = argument;

	shadow_advise(&unified->shadow, taken->address, taken->end, taken->advice, &taken->location);
}

void advised_note(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location)
{
	struct taken taken = { address, address + bytes, advice, location };

	unified_visit(address, note_advice, &taken);
}

static void note_prefetch(struct unified *unified, void *argument)
{
	const struct taken *taken = argument;

	shadow_fetch(&unified->shadow, taken->address, taken->end, &taken->location);
}

void advised_note_prefetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location)
{
	struct taken taken = { .address = address, .end = address + bytes, .location = location };

	unified_visit(address, note_prefetch, &taken);
}

void advised_come(CUdeviceptr address, uint64_t bytes, CUmemLocation location)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = location.type == CU_MEM_LOCATION_TYPE_DEVICE ? unified_own(&address, &end) : NULL;
	CUstreamCaptureMode mode;
	bool comes, any = false;

	if (!unified)
		return;
	comes = location.id == unified->device->ordinal;
	mode = driver_enter();
	for (size_t i = piece_of(unified, address); comes && i < unified->count && unified_piece(unified, i) < end; i++)
		if (unified->place[i] != UNIFIED_ON_GPU)
			any |= comes = piece_come(unified, i);
	driver_leave(mode);
	if (any)
		daemon_report(unified->device);
	unified_disown(unified);
}

bool advised_prefetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location, CUstream stream, bool per_thread,
		      CUresult *result)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = unified_own(&address, &end);

	if (!unified)
		return false;
	*result = CUDA_SUCCESS;
	ours_enter();
	for (CUdeviceptr stop; !*result && address < end; address = stop) {
		stop = run_end(unified, address, end);
		if (is_here(unified, address) || location.type != CU_MEM_LOCATION_TYPE_DEVICE)
			*result = hint_prefetch(address, stop - address, location, stream, per_thread);
		if (!*result)
			shadow_fetch(&unified->shadow, address, stop, &location);
	}
	ours_leave();
	unified_disown(unified);
	return true;
}

bool advised_attribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address, uint64_t bytes,
		       CUresult *result)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = data && bytes ? unified_own(&address, &end) : NULL;
	struct agreed agreed;

	if (!unified)
		return false;
	agreed = shadow_agreed(&unified->shadow, address, end);
	unified_disown(unified);
	*result = shadow_answer(&agreed, attribute, data, size);
	return true;
}
