// SPDX-License-Identifier: Apache-2.0
/* Arrays, and sparse arrays, whose memory the program maps. */
#include "memory.h"

#include <stdlib.h>

/* Memory that is mapped into a sparse array. */
struct tile {
	struct tile *next;
	unsigned int x, y;	/* where the tile begins */
	struct memory *memory;
};

/* The array that was destroyed last: the driver gives its handle out again at once. Accessed atomically. */
static struct CUarray_st *spare;

static CUarray new_array(size_t width, unsigned int format, size_t rows, bool own, CUresult *result)
{
	struct CUarray_st *array = __atomic_exchange_n(&spare, NULL, __ATOMIC_ACQ_REL);

	if (!array)
		array = malloc(sizeof(*array));
	if (!array || format != CU_AD_FORMAT_FLOAT)
		fake_die("an array of format %u", format);
	*array = (struct CUarray_st){ 0 };
	array->width = width;
	*result = own ? fake_allocate(&array->data, width * rows, FAKE_PLAIN, NULL) : CUDA_SUCCESS;
	if (*result == CUDA_SUCCESS)
		return array;
	free(array);
	return NULL;
}

/* Like all calls that free memory, this first waits for running work. */
static CUresult destroy(CUarray array)
{
	CUresult result = fake_unsafe();

	if (result != CUDA_SUCCESS)
		return result;
	fake_drain_context(fake_context());
	while (array->tiles) {
		struct tile *tile = array->tiles;

		array->tiles = tile->next;
		fake_memory_let_go(tile->memory);
		free(tile);
	}
	if (array->data && !fake_deallocate(array->data))
		fake_die("an array whose memory is gone");
	free(__atomic_exchange_n(&spare, array, __ATOMIC_ACQ_REL));
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *about)
{
	CUresult result;
	CUarray array;

	FAKE(cuArrayCreate_v2);
	array = new_array(about->Width * about->NumChannels * 4, about->Format, about->Height ? about->Height : 1, true,
			  &result);
	if (array)
		*pHandle = array;
	return result;
}

static bool owns(const CUDA_ARRAY3D_DESCRIPTOR *about)
{
	return !(about->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING));
}

static size_t rows_of(const CUDA_ARRAY3D_DESCRIPTOR *about)
{
	return (about->Height ? about->Height : 1) * (about->Depth ? about->Depth : 1);
}

FAKE_EXPORT cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *about)
{
	CUresult result;
	CUarray array;

	FAKE(cuArray3DCreate_v2);
	array = new_array(about->Width * about->NumChannels * 4, about->Format, rows_of(about), owns(about), &result);
	if (array)
		*pHandle = array;
	return result;
}

FAKE_EXPORT cuArrayDestroy(CUarray array)
{
	FAKE(cuArrayDestroy);
	return destroy(array);
}

/* With all levels, two dimensions take a third more. */
FAKE_EXPORT cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *about, unsigned int levels)
{
	CUresult result;
	CUarray array;

	FAKE(cuMipmappedArrayCreate);
	if (!levels)
		return CUDA_ERROR_INVALID_VALUE;
	array = new_array(about->Width * about->NumChannels * 4, about->Format, rows_of(about) * 4 / 3, owns(about),
			  &result);
	if (array)
		*pHandle = (CUmipmappedArray)array;
	return result;
}

FAKE_EXPORT cuMipmappedArrayDestroy(CUmipmappedArray array)
{
	FAKE(cuMipmappedArrayDestroy);
	return destroy((CUarray)array);
}

/* Unmap all tiles that begin there. */
static void unmap(CUarray array, unsigned int x, unsigned int y, unsigned int width, unsigned int height)
{
	for (struct tile **at = &array->tiles, *tile; (tile = *at);) {
		if (tile->x < x || tile->x - x >= width || tile->y < y || tile->y - y >= height) {
			at = &tile->next;
			continue;
		}
		*at = tile->next;
		fake_memory_let_go(tile->memory);
		free(tile);
	}
}

/* Rows of a tile of this double. */
#define TILE_ROWS 512

/* Replace what is mapped there. Each tile is mapped by itself, however many a call maps. */
static void map(const CUarrayMapInfo *info)
{
	const unsigned int x = info->subresource.sparseLevel.offsetX, y = info->subresource.sparseLevel.offsetY;
	const unsigned int width = info->subresource.sparseLevel.extentWidth,
			   height = info->subresource.sparseLevel.extentHeight;
	CUarray array = info->resource.array;
	struct tile *tile;

	if (info->resourceType != CU_RESOURCE_TYPE_ARRAY || array->data || info->deviceBitMask != 1)
		fake_die("cuMemMapArrayAsync: not into a sparse array of the first GPU");
	unmap(array, x, y, width, height);
	for (unsigned int row = 0; row < height && info->memOperationType == CU_MEM_OPERATION_TYPE_MAP;
	     row += TILE_ROWS) {
		const unsigned int rows = height - row < TILE_ROWS ? height - row : TILE_ROWS;

		tile = malloc(sizeof(*tile));
		if (!tile)
			fake_die("out of memory");
		*tile = (struct tile){ .next = array->tiles, .x = x, .y = y + row };
		tile->memory = fake_memory_keep(info->memHandle.memHandle, info->offset + (uint64_t)row * width * 4,
						(uint64_t)rows * width * 4, "cuMemMapArrayAsync");
		array->tiles = tile;
	}
}

#define MAP_ARRAY(name, per_thread)								\
	FAKE_EXPORT name(CUarrayMapInfo *list, unsigned int count, CUstream stream)		\
	{											\
		FAKE(name);									\
		fake_drain_stream(fake_stream(stream, per_thread));				\
		for (unsigned int i = 0; i < count; i++)					\
			map(&list[i]);								\
		return CUDA_SUCCESS;								\
	}

MAP_ARRAY(cuMemMapArrayAsync, false)
MAP_ARRAY(cuMemMapArrayAsync_ptsz, true)
