/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program's advice, prefetches and questions about managed memory, where limits may have some of it in the host
 * (unified.h). A call that returns false has done nothing: the memory is none of the library's, or none of it was in
 * the host yet. Then the driver is to be asked, and what it took is noted.
 */
#ifndef GGROUP_CUDA_ADVISED_H
#define GGROUP_CUDA_ADVISED_H

#include "device.h"

bool advised_advise(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location, CUresult *result);
/* Note advice that the driver took. */
void advised_note(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location);

/* Before a prefetch: let what of the range is in the host come, if the daemon has room for it. Outside of the gates. */
void advised_come(CUdeviceptr address, uint64_t bytes, CUmemLocation location);
/* `stream` as the driver is to have it, `per_thread` where its 0 is the thread's own. */
bool advised_prefetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location, CUstream stream, bool per_thread,
		      CUresult *result);
/* Note a prefetch that the driver took. */
void advised_note_prefetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location);

/* Answer as cuMemRangeGetAttribute does. */
bool advised_attribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address, uint64_t bytes,
		       CUresult *result);

#endif
