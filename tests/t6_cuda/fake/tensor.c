// SPDX-License-Identifier: Apache-2.0
/* Tensor maps of the double, made so opaque that no word of one is an address. */

#include "fake.h"

#define WORDS (sizeof(CUtensorMap) / sizeof(cuuint64_t))
#define RANK_MOST 5

/* Mixes `number` into each word. */
static void mix(CUtensorMap *map, uint64_t number)
{
	for (size_t i = 0; i < WORDS; i++) {
		map->opaque[i] = (map->opaque[i] ^ (number + i)) * UINT64_C(0xd6e8feb86659fd93);
		map->opaque[i] ^= map->opaque[i] >> 31;
		map->opaque[i] |= UINT64_C(1) << 63;
	}
}

FAKE_EXPORT cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
				   const cuuint64_t *dim, const cuuint64_t *strides, const cuuint32_t *box,
				   const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
				   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
				   CUtensorMapFloatOOBfill fill)
{
	FAKE(cuTensorMapEncodeTiled);
	(void)box, (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
	if (!map || !rank || rank > RANK_MOST || !address || (uintptr_t)address % 16)
		return CUDA_ERROR_INVALID_VALUE;
	*map = (CUtensorMap){ 0 };
	mix(map, (uint64_t)type << 8 | rank);
	for (cuuint32_t i = 0; i < rank; i++)
		mix(map, dim[i]);
	for (cuuint32_t i = 0; i + 1 < rank; i++)
		mix(map, strides[i]);
	mix(map, (uintptr_t)address);
	return CUDA_SUCCESS;
}

/* The result differs from encoding a map with that address; nothing promises that they are equal. */
FAKE_EXPORT cuTensorMapReplaceAddress(CUtensorMap *map, void *address)
{
	FAKE(cuTensorMapReplaceAddress);
	if (!map || !address || (uintptr_t)address % 16)
		return CUDA_ERROR_INVALID_VALUE;
	mix(map, (uintptr_t)address);
	return CUDA_SUCCESS;
}
