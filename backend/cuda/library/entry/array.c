// SPDX-License-Identifier: Apache-2.0
/* Arrays: opaque, so that they stay the driver's own, charged and named. */

#include "driver.h"
#include "wrapper.h"
#include "foreign.h"

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
		/* 8 bits, and the compressed ones, of which this is about what a texel takes. */
		element = 1;
	}
	return element * (channels ? channels : 1) * (width ? width : 1) * (height ? height : 1) *
	       (depth ? depth : 1);
}

/* `bytes` is looked at once the description is known to be there. */
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

/* Of sparse and deferred ones the program maps the memory itself. */
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

FORWARD_THEN(cuArrayDestroy, (CUarray hArray), (hArray), foreign_gone((uintptr_t)hArray))
FORWARD_THEN(cuMipmappedArrayDestroy, (CUmipmappedArray hMipmappedArray), (hMipmappedArray),
	     foreign_gone((uintptr_t)hMipmappedArray))
