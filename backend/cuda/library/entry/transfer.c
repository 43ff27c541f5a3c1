// SPDX-License-Identifier: Apache-2.0
/*
 * Copies and fills: each goes through the gates, and notes that the memory at its ends has been used. A synchronous one
 * stays inside until it is done; the mover waits a moment for it, and comes again.
 */

#include "driver.h"
#include "wrapper.h"
#include "gate.h"
#include "heat.h"
#include "stream.h"
#include "turn.h"
#include "view.h"

/* The stream of entry points without a parameter of that name. */
static const CUstream hStream = NULL;

/* The GPU that makes the copy of this thread; -1: unknown, or there is no other. It may be another than that of the
 * memory. */
static __thread CUdevice copier;

static void touch(CUdeviceptr pointer, size_t bytes)
{
	if (bytes)
		heat_touch(pointer, bytes);
	if (bytes && copier >= 0)
		view_copied(pointer, bytes, copier);
}

/* Touch `rows` of `width` bytes, `pitch` apart, from `pointer` on. */
static void touch_rows(CUdeviceptr pointer, size_t pitch, size_t width, size_t rows)
{
	if (rows)
		touch(pointer, (rows - 1) * pitch + width);
}

static bool in_memory(CUmemorytype type)
{
	return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED;
}

static void touch_2d(const CUDA_MEMCPY2D *copy)
{
	if (!copy)
		return;
	if (in_memory(copy->srcMemoryType))
		touch_rows(copy->srcDevice + copy->srcY * copy->srcPitch + copy->srcXInBytes,
			   copy->srcPitch, copy->WidthInBytes, copy->Height);
	if (in_memory(copy->dstMemoryType))
		touch_rows(copy->dstDevice + copy->dstY * copy->dstPitch + copy->dstXInBytes,
			   copy->dstPitch, copy->WidthInBytes, copy->Height);
}

/* CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER have the same fields for this. */
#define TOUCH_3D_END(copy, end)									\
	do {											\
		const size_t pitch = (copy)->end##Pitch, height = (copy)->end##Height;		\
		const size_t row = (copy)->end##Z * height + (copy)->end##Y;			\
		const size_t layers = (copy)->Depth ? (copy)->Depth - 1 : 0;			\
												\
		if (in_memory((copy)->end##MemoryType))						\
			touch_rows((copy)->end##Device + row * pitch + (copy)->end##XInBytes,	\
				   pitch, (copy)->WidthInBytes, layers * height + (copy)->Height); \
	} while (0)

static void touch_3d(const CUDA_MEMCPY3D *copy)
{
	if (!copy)
		return;
	TOUCH_3D_END(copy, src);
	TOUCH_3D_END(copy, dst);
}

static void touch_3d_peer(const CUDA_MEMCPY3D_PEER *copy)
{
	if (!copy)
		return;
	TOUCH_3D_END(copy, src);
	TOUCH_3D_END(copy, dst);
}

static void touch_batch(const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes,
			size_t count)
{
	for (size_t i = 0; dsts && srcs && sizes && i < count; i++) {
		touch(dsts[i], sizes[i]);
		touch(srcs[i], sizes[i]);
	}
}

/* Rows of rowLength elements of unknown size: one byte for each is too little, which costs only precision of the
 * heat. */
static void touch_operand(const CUmemcpy3DOperand *operand, const CUextent3D *extent)
{
	if (operand->type == CU_MEMCPY_OPERAND_TYPE_POINTER)
		touch(operand->op.ptr.ptr, extent->width * extent->height * extent->depth);
}

static void touch_3d_batch(size_t count, const CUDA_MEMCPY3D_BATCH_OP *list)
{
	for (size_t i = 0; list && i < count; i++) {
		touch_operand(&list[i].src, &list[i].extent);
		touch_operand(&list[i].dst, &list[i].extent);
	}
}

/* Make a wrapper that evaluates `touches`, for its ends, while heat is wanted, or several GPUs are in use. */
#define TRANSFER(name, parameters, arguments, touches)			\
	WRAPPER name parameters						\
	{								\
		CUresult result;					\
									\
		PASS_INSIDE(name, arguments);				\
		/* The mover waits for every context that it knows. */	\
		device_current();					\
		turn_enter(TURN_OTHER, hStream, PER_THREAD(name));	\
		copier = device_several() ? stream_device(hStream, PER_THREAD(name)) : -1;	\
		if (copier >= 0 || __atomic_load_n(&heat_wanted, __ATOMIC_RELAXED)) {	\
			touches;					\
		}							\
		CALL_REAL(result, name, arguments);			\
		turn_leave(hStream, PER_THREAD(name));			\
		return result;						\
	}

/* Make it for the legacy default stream and for a default stream per thread. */
#define TRANSFERS(name, suffix, parameters, arguments, touches)	\
	TRANSFER(name, parameters, arguments, touches)		\
	TRANSFER(name##suffix, parameters, arguments, touches)

TRANSFERS(cuMemcpy, _ptds, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount),
	  (dst, src, ByteCount), touch(dst, ByteCount); touch(src, ByteCount))
TRANSFERS(cuMemcpyAsync, _ptsz,
	  (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream),
	  (dst, src, ByteCount, hStream), touch(dst, ByteCount); touch(src, ByteCount))
TRANSFERS(cuMemcpyPeer, _ptds,
	  (CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
	   size_t ByteCount),
	  (dstDevice, dstContext, srcDevice, srcContext, ByteCount),
	  touch(dstDevice, ByteCount); touch(srcDevice, ByteCount))
TRANSFERS(cuMemcpyPeerAsync, _ptsz,
	  (CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
	   size_t ByteCount, CUstream hStream),
	  (dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream),
	  touch(dstDevice, ByteCount); touch(srcDevice, ByteCount))
TRANSFERS(cuMemcpyHtoD_v2, _ptds, (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount),
	  (dstDevice, srcHost, ByteCount), touch(dstDevice, ByteCount))
TRANSFERS(cuMemcpyDtoH_v2, _ptds, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount),
	  (dstHost, srcDevice, ByteCount), touch(srcDevice, ByteCount))
TRANSFERS(cuMemcpyDtoD_v2, _ptds, (CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount),
	  (dstDevice, srcDevice, ByteCount),
	  touch(dstDevice, ByteCount); touch(srcDevice, ByteCount))
TRANSFERS(cuMemcpyHtoDAsync_v2, _ptsz,
	  (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream),
	  (dstDevice, srcHost, ByteCount, hStream), touch(dstDevice, ByteCount))
TRANSFERS(cuMemcpyDtoHAsync_v2, _ptsz,
	  (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),
	  (dstHost, srcDevice, ByteCount, hStream), touch(srcDevice, ByteCount))
TRANSFERS(cuMemcpyDtoDAsync_v2, _ptsz,
	  (CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),
	  (dstDevice, srcDevice, ByteCount, hStream),
	  touch(dstDevice, ByteCount); touch(srcDevice, ByteCount))
TRANSFERS(cuMemcpyDtoA_v2, _ptds,
	  (CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount),
	  (dstArray, dstOffset, srcDevice, ByteCount), touch(srcDevice, ByteCount))
TRANSFERS(cuMemcpyAtoD_v2, _ptds,
	  (CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount),
	  (dstDevice, srcArray, srcOffset, ByteCount), touch(dstDevice, ByteCount))
/* Arrays are the driver's own, and stay on the GPU. */
TRANSFERS(cuMemcpyHtoA_v2, _ptds,
	  (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount),
	  (dstArray, dstOffset, srcHost, ByteCount), )
TRANSFERS(cuMemcpyAtoH_v2, _ptds,
	  (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount),
	  (dstHost, srcArray, srcOffset, ByteCount), )
TRANSFERS(cuMemcpyAtoA_v2, _ptds,
	  (CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset,
	   size_t ByteCount),
	  (dstArray, dstOffset, srcArray, srcOffset, ByteCount), )
TRANSFERS(cuMemcpyHtoAAsync_v2, _ptsz,
	  (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount,
	   CUstream hStream),
	  (dstArray, dstOffset, srcHost, ByteCount, hStream), )
TRANSFERS(cuMemcpyAtoHAsync_v2, _ptsz,
	  (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream),
	  (dstHost, srcArray, srcOffset, ByteCount, hStream), )

TRANSFERS(cuMemcpy2D_v2, _ptds, (const CUDA_MEMCPY2D *pCopy), (pCopy), touch_2d(pCopy))
TRANSFERS(cuMemcpy2DUnaligned_v2, _ptds, (const CUDA_MEMCPY2D *pCopy), (pCopy), touch_2d(pCopy))
TRANSFERS(cuMemcpy2DAsync_v2, _ptsz, (const CUDA_MEMCPY2D *pCopy, CUstream hStream),
	  (pCopy, hStream), touch_2d(pCopy))
TRANSFERS(cuMemcpy3D_v2, _ptds, (const CUDA_MEMCPY3D *pCopy), (pCopy), touch_3d(pCopy))
TRANSFERS(cuMemcpy3DAsync_v2, _ptsz, (const CUDA_MEMCPY3D *pCopy, CUstream hStream),
	  (pCopy, hStream), touch_3d(pCopy))
TRANSFERS(cuMemcpy3DPeer, _ptds, (const CUDA_MEMCPY3D_PEER *pCopy), (pCopy), touch_3d_peer(pCopy))
TRANSFERS(cuMemcpy3DPeerAsync, _ptsz, (const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream),
	  (pCopy, hStream), touch_3d_peer(pCopy))

TRANSFERS(cuMemcpyBatchAsync, _ptsz,
	  (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
	   CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
	   CUstream hStream),
	  (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream),
	  touch_batch(dsts, srcs, sizes, count))
TRANSFERS(cuMemcpyBatchAsync_v2, _ptsz,
	  (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
	   CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream hStream),
	  (dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, hStream),
	  touch_batch(dsts, srcs, sizes, count))
TRANSFERS(cuMemcpy3DBatchAsync, _ptsz,
	  (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx, unsigned long long flags,
	   CUstream hStream),
	  (numOps, opList, failIdx, flags, hStream), touch_3d_batch(numOps, opList))
TRANSFERS(cuMemcpy3DBatchAsync_v2, _ptsz,
	  (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags,
	   CUstream hStream),
	  (numOps, opList, flags, hStream), touch_3d_batch(numOps, opList))

TRANSFERS(cuMemsetD8_v2, _ptds, (CUdeviceptr dstDevice, unsigned char uc, size_t N),
	  (dstDevice, uc, N), touch(dstDevice, N))
TRANSFERS(cuMemsetD16_v2, _ptds, (CUdeviceptr dstDevice, unsigned short us, size_t N),
	  (dstDevice, us, N), touch(dstDevice, 2 * N))
TRANSFERS(cuMemsetD32_v2, _ptds, (CUdeviceptr dstDevice, unsigned int ui, size_t N),
	  (dstDevice, ui, N), touch(dstDevice, 4 * N))
TRANSFERS(cuMemsetD8Async, _ptsz,
	  (CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream),
	  (dstDevice, uc, N, hStream), touch(dstDevice, N))
TRANSFERS(cuMemsetD16Async, _ptsz,
	  (CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream),
	  (dstDevice, us, N, hStream), touch(dstDevice, 2 * N))
TRANSFERS(cuMemsetD32Async, _ptsz,
	  (CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream),
	  (dstDevice, ui, N, hStream), touch(dstDevice, 4 * N))

/* Width is in elements. */
#define FILL_2D(bits, type, value)								\
	TRANSFERS(cuMemsetD2D##bits##_v2, _ptds,						\
		  (CUdeviceptr dstDevice, size_t dstPitch, type value, size_t Width,		\
		   size_t Height),								\
		  (dstDevice, dstPitch, value, Width, Height),					\
		  touch_rows(dstDevice, dstPitch, Width * ((bits) / 8), Height))		\
	TRANSFERS(cuMemsetD2D##bits##Async, _ptsz,						\
		  (CUdeviceptr dstDevice, size_t dstPitch, type value, size_t Width,		\
		   size_t Height, CUstream hStream),						\
		  (dstDevice, dstPitch, value, Width, Height, hStream),				\
		  touch_rows(dstDevice, dstPitch, Width * ((bits) / 8), Height))

FILL_2D(8, unsigned char, uc)
FILL_2D(16, unsigned short, us)
FILL_2D(32, unsigned int, ui)
