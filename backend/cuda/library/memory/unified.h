/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Managed memory: the driver moves its pages by itself, and counts them for no program. How much of it may be on the GPU is
 * decided by advice of ours: a piece that is to be in the host prefers to be there, and the GPU uses it there
 * (CU_MEM_ADVISE_SET_PREFERRED_LOCATION, _SET_ACCESSED_BY). All else is charged, as if it were on the GPU; that is an upper
 * bound. No gate is closed, and nothing has to rest: the driver keeps pages coherent while they move.
 *
 * The program's own advice is kept beside that, and holds again where a piece may be on the GPU; once any of an allocation
 * was in the host, questions about it are answered from what is kept.
 */
#ifndef GGROUP_CUDA_UNIFIED_H
#define GGROUP_CUDA_UNIFIED_H

#include "device.h"

struct unified;

/* What the driver has placed, in a context of `device`: charged, and what the limits refuse is in the host from the
 * beginning. false: it is not ours to limit (the GPU takes no such advice, or the daemon is an older one). */
bool unified_made(struct device *device, CUdeviceptr address, uint64_t bytes, CUcontext context);
/* What the driver is about to free; NULL: not known here. As foreign_take. */
struct unified *unified_take(CUdeviceptr address);
void unified_taken(struct unified *taken, bool freed);

/* Advice and prefetches of the program. false: it is none of ours, or none of it was in the host yet, and the driver is to
 * be asked; what it then took is noted. */
bool unified_advise(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location, CUresult *result);
void unified_advised(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location);
/* Before a prefetch: what of the range is in the host may come, if the daemon has room for it. Outside of the gates. */
void unified_fetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location);
/* ... `stream` as the driver is to have it, `per_thread` where its 0 is the thread's own. */
bool unified_prefetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location, CUstream stream, bool per_thread,
		      CUresult *result);
void unified_prefetched(CUdeviceptr address, uint64_t bytes, CUmemLocation location);
/* cuMemRangeGetAttribute; false: as above. */
bool unified_attribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address, uint64_t bytes,
		       CUresult *result);
/* Whether any of a range is of an allocation of which some was in the host. */
bool unified_touched(CUdeviceptr address, uint64_t bytes);

/* By the listening thread: has at least `bytes` be in the host, or what can be, in pieces; what is, is credit
 * (pool_credit). */
uint64_t unified_out(struct device *device, uint64_t bytes);
/* Lets up to `bytes` be on the GPU again, asking the daemon for room (daemon_move_in), until that is refused. */
uint64_t unified_in(struct device *device, uint64_t bytes);

#endif
