// SPDX-License-Identifier: Apache-2.0
/* Tensor maps: which memory each encoded map describes (move/tensor.h). */

#include "driver.h"
#include "region.h"
#include "tensor.h"
#include "wrapper.h"

/* The size of an element in memory, in bits. */
static size_t bits_of(CUtensorMapDataType type)
{
	switch (type) {
	case CU_TENSOR_MAP_DATA_TYPE_UINT8:
		return 8;
	case CU_TENSOR_MAP_DATA_TYPE_UINT16:
	case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
	case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
		return 16;
	case CU_TENSOR_MAP_DATA_TYPE_UINT64:
	case CU_TENSOR_MAP_DATA_TYPE_INT64:
	case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
		return 64;
	case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B:
	case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B:
		return 4;
	case CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B:
		return 6;
	default:
		return 32;
	}
}

/* Limits `bytes` to the allocation at `address`: a program may encode a dimension without an end. 0: it is no
 * allocation of ours. */
static size_t in_allocation(CUdeviceptr address, size_t bytes)
{
	struct device *device;
	CUdeviceptr start;
	size_t all;

	if (!region_find(address, &start, &all, &device))
		return 0;
	return bytes < start + all - address ? bytes : start + all - address;
}

/* "globalStrides array, which specifies tensor stride of each of the lower tensorRank - 1 dimensions in bytes". */
static void encoded(const CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, const void *address,
		    const cuuint64_t *dim, const cuuint64_t *strides)
{
	const CUdeviceptr at = (CUdeviceptr)(uintptr_t)address;
	size_t bytes = (dim[0] * bits_of(type) + 7) / 8, more;

	for (cuuint32_t i = 1; i < rank; i++)
		if (__builtin_mul_overflow(dim[i] - 1, strides[i - 1], &more) ||
		    __builtin_add_overflow(bytes, more, &bytes))
			bytes = SIZE_MAX;
	tensor_encoded(map, at, in_allocation(at, bytes));
}

#define ENCODE(name, parameters, arguments)	\
	FORWARD_THEN(name, parameters, arguments, \
		     encoded(tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides))

ENCODE(cuTensorMapEncodeTiled,
       (CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank, void *globalAddress,
	const cuuint64_t *globalDim, const cuuint64_t *globalStrides, const cuuint32_t *boxDim,
	const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
	CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill),
       (tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, boxDim, elementStrides,
	interleave, swizzle, l2Promotion, oobFill))
ENCODE(cuTensorMapEncodeIm2col,
       (CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank, void *globalAddress,
	const cuuint64_t *globalDim, const cuuint64_t *globalStrides, const int *pixelBoxLowerCorner,
	const int *pixelBoxUpperCorner, cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn,
	const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
	CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill),
       (tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, pixelBoxLowerCorner,
	pixelBoxUpperCorner, channelsPerPixel, pixelsPerColumn, elementStrides, interleave, swizzle, l2Promotion,
	oobFill))
ENCODE(cuTensorMapEncodeIm2colWide,
       (CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank, void *globalAddress,
	const cuuint64_t *globalDim, const cuuint64_t *globalStrides, int pixelBoxLowerCornerWidth,
	int pixelBoxUpperCornerWidth, cuuint32_t channelsPerPixel, cuuint32_t pixelsPerColumn,
	const cuuint32_t *elementStrides, CUtensorMapInterleave interleave, CUtensorMapIm2ColWideMode mode,
	CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill),
       (tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, pixelBoxLowerCornerWidth,
	pixelBoxUpperCornerWidth, channelsPerPixel, pixelsPerColumn, elementStrides, interleave, mode, swizzle,
	l2Promotion, oobFill))

WRAPPER cuTensorMapReplaceAddress(CUtensorMap *tensorMap, void *globalAddress)
{
	const CUdeviceptr at = (CUdeviceptr)(uintptr_t)globalAddress;
	CUtensorMap before = { 0 };
	CUdeviceptr old;
	CUresult result;
	size_t bytes;

	PASS_INSIDE(cuTensorMapReplaceAddress, (tensorMap, globalAddress));
	if (tensorMap)
		before = *tensorMap;
	CALL_REAL(result, cuTensorMapReplaceAddress, (tensorMap, globalAddress));
	if (result == CUDA_SUCCESS && tensor_find(&before, &old, &bytes))
		tensor_encoded(tensorMap, at, in_allocation(at, bytes));
	return result;
}
