// SPDX-License-Identifier: Apache-2.0
/* Arrays, whose memory is the driver's own; and sparse arrays, into which the program maps physical memory. */
#include "steps.h"

#include "calls.h"
#include "model.h"

#define ARRAYS 5
/* Tiles of a sparse array; each takes a page. */
#define TILES 4
/* Elements of 4 bytes in a row, and rows in a page. */
#define WIDTH 1024
#define ROWS 512

static struct array {
	CUarray array;		/* NULL: none, or `levels` */
	CUmipmappedArray levels;
	bool sparse;
	struct thing *tile[TILES];
} arrays[ARRAYS];

void arrays_make(void)
{
	CUDA_ARRAY3D_DESCRIPTOR deep = { .Width = WIDTH, .Height = ROWS, .Depth = 1 + model_any(3),
					 .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1 };
	const CUDA_ARRAY_DESCRIPTOR flat = { .Width = WIDTH, .Height = ROWS * (1 + model_any(3)),
					     .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1 };
	struct array *array = arrays;

	while (array < arrays + ARRAYS && (array->array || array->levels))
		array++;
	if (array == arrays + ARRAYS)
		return;
	*array = (struct array){ 0 };
	switch (model_any(5)) {
	case 0:
		DO(cuArrayCreate_v2, (&array->array, &flat));
		break;
	case 1:
		DO(cuArray3DCreate_v2, (&array->array, &deep));
		break;
	case 2:	/* all levels together take a third more: whole pages */
		deep.Height = ROWS * 3;
		deep.Depth = 0;
		DO(cuMipmappedArrayCreate, (&array->levels, &deep, 4));
		break;
	default:
		deep.Flags = CUDA_ARRAY3D_SPARSE;
		deep.Depth = 0;
		deep.Height = ROWS * TILES;
		DO(cuArray3DCreate_v2, (&array->array, &deep));
		array->sparse = true;
	}
}

static void unmapped(struct thing *thing)
{
	thing->bound--;
	model_settle(thing);
}

static void destroy(struct array *array)
{
	if (array->levels)
		DO(cuMipmappedArrayDestroy, (array->levels));
	else
		DO(cuArrayDestroy, (array->array));
	for (int i = 0; i < TILES; i++)
		if (array->tile[i])
			unmapped(array->tile[i]);
	*array = (struct array){ 0 };
}

void arrays_destroy(void)
{
	struct array *array = &arrays[model_any(ARRAYS)];

	if (array->array || array->levels)
		destroy(array);
}

static struct array *any_sparse(void)
{
	for (size_t i = 0, first = model_any(ARRAYS); i < ARRAYS; i++)
		if (arrays[(first + i) % ARRAYS].sparse)
			return &arrays[(first + i) % ARRAYS];
	return NULL;
}

static bool can_be_mapped(const struct thing *thing)
{
	return thing->held && !thing->multicast;
}

/* Map a page of memory to a tile, or unmap the tile. */
void arrays_map(void)
{
	struct array *array = any_sparse();
	struct thing *thing = model_thing_that(can_be_mapped);
	const unsigned int tile = (unsigned int)model_any(TILES);
	CUarrayMapInfo info = {
		.resourceType = CU_RESOURCE_TYPE_ARRAY, .resource.array = array ? array->array : NULL,
		.subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL,
		.subresource.sparseLevel = { .offsetY = tile * ROWS, .extentWidth = WIDTH, .extentHeight = ROWS,
					     .extentDepth = 1 },
		.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC, .deviceBitMask = 1,
	};

	if (!array || !thing)
		return;
	if (array->tile[tile]) {
		info.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP;
	} else {
		info.memOperationType = CU_MEM_OPERATION_TYPE_MAP;
		info.memHandle.memHandle = thing->name;
		info.offset = model_any(thing->pages) * PAGE;
	}
	if (model_any(2))
		DO(cuMemMapArrayAsync, (&info, 1, model.streams[0]));
	else
		DO(cuMemMapArrayAsync_ptsz, (&info, 1, NULL));
	if (array->tile[tile]) {
		unmapped(array->tile[tile]);
		array->tile[tile] = NULL;
	} else {
		thing->bound++;
		thing->stays = true;
		array->tile[tile] = thing;
	}
}

void arrays_end(void)
{
	for (struct array *array = arrays; array < arrays + ARRAYS; array++)
		if (array->array || array->levels)
			destroy(array);
}
