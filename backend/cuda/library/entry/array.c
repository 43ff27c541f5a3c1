// SPDX-License-Identifier: Apache-2.0
/* Arrays: opaque, so they stay the driver's own, charged and named. And sparse arrays, to which the program maps its
 * own memory at no address. */

#include <stdlib.h>

#include "driver.h"
#include "foreign.h"
#include "handle.h"
#include "turn.h"
#include "wrapper.h"

static uint64_t bytes_of(CUarray_format format, unsigned int channels, size_t width, size_t height,
			 size_t depth)
{
	uint64_t element;

	switch (format) {
	case CU_AD_FORMAT_UNSIGNED_INT16:
	case CU_AD_FORMAT_SIGNED_INT16:
	case CU_AD_FORMAT_HALF:
		element = 2;
		break;
	case CU_AD_FORMAT_UNSIGNED_INT32:
	case CU_AD_FORMAT_SIGNED_INT32:
	case CU_AD_FORMAT_FLOAT:
		element = 4;
		break;
	default:
		/* 8 bits, and the compressed formats, which take about that much per texel. */
		element = 1;
	}
	return element * (channels ? channels : 1) * (width ? width : 1) * (height ? height : 1) *
	       (depth ? depth : 1);
}

/* `bytes` is evaluated once the description is known to exist. */
#define ARRAY(name, parameters, arguments, description, bytes, own)				\
	WRAPPER name parameters									\
	{											\
		struct device *device;								\
		uint64_t size = 0;								\
		CUresult result;								\
												\
		PASS_INSIDE(name, arguments);							\
		device = device_current();						\
		if ((description) && (own))							\
			size = (bytes);								\
		if (size)									\
			FOREIGN(result, device, size, (uintptr_t)*pHandle, name, arguments);	\
		else										\
			CALL_REAL(result, name, arguments);					\
		return result;									\
	}

/* For sparse and deferred arrays the program maps the memory itself. */
#define OWN(array) (!((array)->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)))

#define BYTES_3D(array)										\
	bytes_of((array)->Format, (array)->NumChannels, (array)->Width, (array)->Height,	\
		 (array)->Depth)

ARRAY(cuArrayCreate_v2, (CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray),
      (pHandle, pAllocateArray), pAllocateArray,
      bytes_of(pAllocateArray->Format, pAllocateArray->NumChannels, pAllocateArray->Width,
	       pAllocateArray->Height, 1),
      true)
ARRAY(cuArray3DCreate_v2, (CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray),
      (pHandle, pAllocateArray), pAllocateArray, BYTES_3D(pAllocateArray), OWN(pAllocateArray))
/* All levels together are less than 8/7, 4/3 or 2 of the first, in 3, 2 or 1 dimensions. */
ARRAY(cuMipmappedArrayCreate,
      (CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
       unsigned int numMipmapLevels),
      (pHandle, pMipmappedArrayDesc, numMipmapLevels), pMipmappedArrayDesc,
      BYTES_3D(pMipmappedArrayDesc) * 4 / 3, OWN(pMipmappedArrayDesc))

/* Its handle may be given to another array as soon as it is gone. */
#define DESTROY(name, type)								\
	WRAPPER name(type array)							\
	{										\
		struct binding *bindings;						\
		struct foreign *foreign;						\
		CUresult result;							\
											\
		PASS_INSIDE(name, (array));						\
		foreign = foreign_take((uintptr_t)array);				\
		bindings = binding_take_all((uintptr_t)array);				\
		CALL_REAL(result, name, (array));					\
		foreign_taken(foreign, (uintptr_t)array, result == CUDA_SUCCESS);	\
		binding_taken(bindings, result == CUDA_SUCCESS);			\
		return result;								\
	}

DESTROY(cuArrayDestroy, CUarray)
DESTROY(cuMipmappedArrayDestroy, CUmipmappedArray)

/* Maps, of which the driver does all or none. Mapped memory stays in place, and is charged as long as it is mapped
 * (binding.h). */
struct maps {
	unsigned int count;
	CUarrayMapInfo *list;		/* as the driver has it */
	struct binding **bindings;	/* NULL: it unmaps */
};

static struct maps maps_of(const CUarrayMapInfo *list, unsigned int count)
{
	struct maps maps = { .count = count, .list = malloc(count * sizeof(*maps.list)),
			     .bindings = calloc(count, sizeof(struct binding *)) };

	for (unsigned int i = 0; maps.list && i < count; i++)
		maps.list[i] = list[i];
	return maps;
}

static CUresult fix_all(struct maps *maps)
{
	CUresult result = maps->list && maps->bindings ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

	for (unsigned int i = 0; i < maps->count && result == CUDA_SUCCESS; i++) {
		CUmemGenericAllocationHandle *handle = &maps->list[i].memHandle.memHandle;

		if (maps->list[i].memOperationType != CU_MEM_OPERATION_TYPE_MAP)
			continue;
		maps->bindings[i] = binding_new();
		result = maps->bindings[i] ? handle_fix(*handle, handle, maps->bindings[i]) : CUDA_ERROR_OUT_OF_MEMORY;
	}
	return result;
}

static struct binding_box box_of(const CUarrayMapInfo *info)
{
	if (info->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL)
		return (struct binding_box){ .kind = BINDING_MIPTAIL, .layer = info->subresource.miptail.layer,
					     .from = { info->subresource.miptail.offset },
					     .to = { info->subresource.miptail.offset +
						     info->subresource.miptail.size } };
	return (struct binding_box){
		.kind = BINDING_LEVEL, .level = info->subresource.sparseLevel.level,
		.layer = info->subresource.sparseLevel.layer,
		.from = { info->subresource.sparseLevel.offsetX, info->subresource.sparseLevel.offsetY,
			  info->subresource.sparseLevel.offsetZ },
		.to = { (uint64_t)info->subresource.sparseLevel.offsetX + info->subresource.sparseLevel.extentWidth,
			(uint64_t)info->subresource.sparseLevel.offsetY + info->subresource.sparseLevel.extentHeight,
			(uint64_t)info->subresource.sparseLevel.offsetZ + info->subresource.sparseLevel.extentDepth },
	};
}

/* End the earlier mappings where something is mapped or unmapped now. */
static void settle(struct maps *maps, CUresult result)
{
	for (unsigned int i = 0; maps->bindings && i < maps->count; i++) {
		const struct binding_box box = result == CUDA_SUCCESS ? box_of(&maps->list[i]) :
									(struct binding_box){ 0 };
		const uint64_t holder = maps->list ? (uintptr_t)maps->list[i].resource.array : 0;

		if (result == CUDA_SUCCESS)
			binding_clear(holder, &box);
		if (result == CUDA_SUCCESS && maps->bindings[i])
			binding_enter(maps->bindings[i], holder, driver_context(), &box);
		else if (maps->bindings[i])
			binding_drop(maps->bindings[i]);
	}
	free(maps->list);
	free(maps->bindings);
}

/* A map has its place in a stream, behind other work: it waits for the turn, once what it needs has come back. */
#define MAP_IN_TURN(result, name, list, count, stream)					\
	do {										\
		turn_enter(TURN_OTHER, stream, PER_THREAD(name));			\
		CALL_REAL(result, name, (list, count, stream));				\
		turn_leave(stream, PER_THREAD(name));					\
	} while (0)

#define MAP_ARRAY(name)									\
	WRAPPER name(CUarrayMapInfo *mapInfoList, unsigned int count, CUstream hStream)	\
	{										\
		struct maps maps;							\
		CUresult result;							\
											\
		PASS_INSIDE(name, (mapInfoList, count, hStream));			\
		if (!mapInfoList || !count) {						\
			MAP_IN_TURN(result, name, mapInfoList, count, hStream);		\
			return result;							\
		}									\
		maps = maps_of(mapInfoList, count);					\
		result = fix_all(&maps);						\
		if (result == CUDA_SUCCESS)						\
			MAP_IN_TURN(result, name, maps.list, count, hStream);		\
		settle(&maps, result);							\
		return result;								\
	}

MAP_ARRAY(cuMemMapArrayAsync)
MAP_ARRAY(cuMemMapArrayAsync_ptsz)
