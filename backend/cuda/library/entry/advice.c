// SPDX-License-Identifier: Apache-2.0
/* What a program says of its managed memory, and asks about it: kept beside the hints of the library (shadow.h). */

#include "advised.h"
#include "driver.h"
#include "gate.h"
#include "turn.h"
#include "unified.h"
#include "wrapper.h"

static CUmemLocation location_of(CUdevice device)
{
	return (CUmemLocation){
		.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE,
		.id = device == CU_DEVICE_CPU ? 0 : device,
	};
}

#define ADVISE(name, type, location, argument)						\
	WRAPPER name(CUdeviceptr devPtr, size_t count, CUmem_advise advice, type argument)	\
	{										\
		CUresult result;							\
											\
		PASS_INSIDE(name, (devPtr, count, advice, argument));			\
		if (advised_advise(devPtr, count, advice, location, &result))		\
			return result;							\
		CALL_REAL(result, name, (devPtr, count, advice, argument));		\
		if (result == CUDA_SUCCESS)						\
			advised_note(devPtr, count, advice, location);		\
		return result;								\
	}

ADVISE(cuMemAdvise, CUdevice, location_of(device), device)
ADVISE(cuMemAdvise_v2, CUmemLocation, location, location)

/* What may come for it comes first, outside of the gates: the daemon is asked for that, and may ask for something
 * meanwhile. */
#define PREFETCH(name, parameters, arguments, location)						\
	WRAPPER name parameters									\
	{											\
		CUresult result;								\
												\
		PASS_INSIDE(name, arguments);							\
		advised_come(devPtr, count, location);						\
		turn_enter(TURN_OTHER, hStream, PER_THREAD(name));				\
		if (!advised_prefetch(devPtr, count, location, hStream, PER_THREAD(name), &result)) {	\
			CALL_REAL(result, name, arguments);					\
			if (result == CUDA_SUCCESS)						\
				advised_note_prefetch(devPtr, count, location);			\
		}										\
		turn_leave(hStream, PER_THREAD(name));						\
		return result;									\
	}

PREFETCH(cuMemPrefetchAsync, (CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream),
	 (devPtr, count, dstDevice, hStream), location_of(dstDevice))
PREFETCH(cuMemPrefetchAsync_ptsz, (CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream),
	 (devPtr, count, dstDevice, hStream), location_of(dstDevice))
PREFETCH(cuMemPrefetchAsync_v2,
	 (CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream),
	 (devPtr, count, location, flags, hStream), location)
PREFETCH(cuMemPrefetchAsync_v2_ptsz,
	 (CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream),
	 (devPtr, count, location, flags, hStream), location)

/* Many ranges at once: the one location that each is for. */
static const CUmemLocation *location_in(const CUmemLocation *locations, const size_t *firsts, size_t count,
					size_t range)
{
	size_t i = 0;

	while (firsts && i + 1 < count && firsts[i + 1] <= range)
		i++;
	return locations && count ? &locations[i] : NULL;
}

/* Whether any is of an allocation of which some was in the host: then each is prefetched by itself. */
static bool any_touched(const CUdeviceptr *starts, const size_t *sizes, size_t count)
{
	for (size_t i = 0; starts && sizes && i < count; i++)
		if (unified_touched(starts[i], sizes[i]))
			return true;
	return false;
}

static CUresult one_by_one(const CUdeviceptr *starts, const size_t *sizes, size_t count, const CUmemLocation *locations,
			   const size_t *firsts, size_t location_count, CUstream stream, bool per_thread)
{
	CUresult result = CUDA_SUCCESS;

	for (size_t i = 0; i < count && !result; i++) {
		const CUmemLocation *location = location_in(locations, firsts, location_count, i);

		if (!location)
			return CUDA_ERROR_INVALID_VALUE;
		if (advised_prefetch(starts[i], sizes[i], *location, stream, per_thread, &result))
			continue;
		if (per_thread)
			CALL_REAL(result, cuMemPrefetchAsync_v2_ptsz, (starts[i], sizes[i], *location, 0, stream));
		else
			CALL_REAL(result, cuMemPrefetchAsync_v2, (starts[i], sizes[i], *location, 0, stream));
		if (!result)
			advised_note_prefetch(starts[i], sizes[i], *location);
	}
	return result;
}

#define BATCH(name, discard, ours)									\
	WRAPPER name(CUdeviceptr *dptrs, size_t *sizes, size_t count, CUmemLocation *prefetchLocs,	\
		     size_t *prefetchLocIdxs, size_t numPrefetchLocs, unsigned long long flags,		\
		     CUstream hStream)									\
	{												\
		const bool touched = any_touched(dptrs, sizes, count);					\
		CUresult result = CUDA_SUCCESS;								\
													\
		PASS_INSIDE(name, (dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs,	\
				   flags, hStream));							\
		for (size_t i = 0; touched && i < count; i++) {						\
			const CUmemLocation *location =							\
				location_in(prefetchLocs, prefetchLocIdxs, numPrefetchLocs, i);		\
													\
			if (location)									\
				advised_come(dptrs[i], sizes[i], *location);				\
		}											\
		turn_enter(TURN_OTHER, hStream, PER_THREAD(name));					\
		if (!touched) {										\
			CALL_REAL(result, name,								\
				  (dptrs, sizes, count, prefetchLocs, prefetchLocIdxs, numPrefetchLocs,	\
				   flags, hStream));							\
			for (size_t i = 0; !result && i < count; i++) {					\
				const CUmemLocation *location =						\
					location_in(prefetchLocs, prefetchLocIdxs, numPrefetchLocs, i);	\
													\
				if (location)								\
					advised_note_prefetch(dptrs[i], sizes[i], *location);		\
			}										\
		} else {										\
			if (ours)									\
				CALL_REAL(result, discard, (dptrs, sizes, count, flags, hStream));	\
			if (!result)									\
				result = one_by_one(dptrs, sizes, count, prefetchLocs, prefetchLocIdxs,	\
						    numPrefetchLocs, hStream, PER_THREAD(name));	\
		}											\
		turn_leave(hStream, PER_THREAD(name));							\
		return result;										\
	}

BATCH(cuMemPrefetchBatchAsync, cuMemDiscardBatchAsync, false)
BATCH(cuMemPrefetchBatchAsync_ptsz, cuMemDiscardBatchAsync_ptsz, false)
BATCH(cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardBatchAsync, true)
BATCH(cuMemDiscardAndPrefetchBatchAsync_ptsz, cuMemDiscardBatchAsync_ptsz, true)

WRAPPER cuMemRangeGetAttribute(void *data, size_t dataSize, CUmem_range_attribute attribute, CUdeviceptr devPtr,
			       size_t count)
{
	CUresult result;

	PASS_INSIDE(cuMemRangeGetAttribute, (data, dataSize, attribute, devPtr, count));
	if (!advised_attribute(data, dataSize, attribute, devPtr, count, &result))
		CALL_REAL(result, cuMemRangeGetAttribute, (data, dataSize, attribute, devPtr, count));
	return result;
}

WRAPPER cuMemRangeGetAttributes(void **data, size_t *dataSizes, CUmem_range_attribute *attributes, size_t numAttributes,
				CUdeviceptr devPtr, size_t count)
{
	CUresult result;

	PASS_INSIDE(cuMemRangeGetAttributes, (data, dataSizes, attributes, numAttributes, devPtr, count));
	if (!data || !dataSizes || !attributes || !numAttributes || !unified_touched(devPtr, count)) {
		CALL_REAL(result, cuMemRangeGetAttributes, (data, dataSizes, attributes, numAttributes, devPtr, count));
		return result;
	}
	result = CUDA_SUCCESS;
	for (size_t i = 0; i < numAttributes && !result; i++)
		if (!advised_attribute(data[i], dataSizes[i], attributes[i], devPtr, count, &result))
			CALL_REAL(result, cuMemRangeGetAttribute,
				  (data[i], dataSizes[i], attributes[i], devPtr, count));
	return result;
}
