/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the double that handle memory. */
#ifndef FAKE_MEMORY_H
#define FAKE_MEMORY_H

#include "fake.h"

struct CUmemPoolHandle_st {
	CUdevice device;
	uint64_t used;		/* atomically; changed under the lock of memory.c */
	uint64_t threshold;
	uint64_t accessible;	/* one bit per device */
	uint64_t read_only;	/* subset of those */
	bool shareable, imported;
};

/* An array in linear memory: rows side by side, levels one after another. */
struct CUarray_st {
	CUdeviceptr data;	/* 0: the program maps memory of its own */
	size_t width;		/* bytes */
	struct tile *tiles;	/* tiles that are mapped */
};

/* An allocation of the driver's own. */
enum fake_memory_kind {
	FAKE_PLAIN,
	FAKE_MANAGED,
	FAKE_OF_GRAPH,	/* by a node of a graph: counted nowhere */
	FAKE_IMPORTED,	/* from a pool: counted where it was allocated */
};
CUresult fake_allocate(CUdeviceptr *ptr, size_t bytes, enum fake_memory_kind kind, CUmemoryPool pool);
/* Return false if none begins there. */
bool fake_deallocate(CUdeviceptr address);
/* Return its size in bytes; 0 if none begins there. */
uint64_t fake_allocated(CUdeviceptr address, CUmemoryPool *pool);

/* Find the managed allocation that has an address, and its number; false where there is none. */
bool fake_managed(CUdeviceptr address, uint64_t *start, uint64_t *bytes, uint64_t *id);

/* Make a multicast object: a handle without memory of its own. Bound memory lives until it, or the object, is gone. */
CUmemGenericAllocationHandle fake_memory_multicast(uint64_t bytes);
/* Return false if it does not end within the object. */
bool fake_memory_bind(CUmemGenericAllocationHandle object, uint64_t offset, CUmemGenericAllocationHandle handle,
		      uint64_t from, uint64_t bytes, const char *what);
/* Return false for that, or if the addresses do not belong to one piece of memory. */
bool fake_memory_bind_at(CUmemGenericAllocationHandle object, uint64_t offset, CUdeviceptr address, uint64_t bytes,
			 const char *what);
/* Return false if nothing was bound like that. */
bool fake_memory_unbind(CUmemGenericAllocationHandle object, uint64_t offset, uint64_t bytes, const char *what);
/* Keep memory alive as if it were mapped. Abort unless it is a handle of memory on a GPU. */
struct memory *fake_memory_keep(CUmemGenericAllocationHandle handle, uint64_t offset, uint64_t bytes, const char *what);
void fake_memory_let_go(struct memory *memory);
/* Return a descriptor of the memory mapped at these addresses; negative if nothing is mapped. */
int fake_memory_lease(CUdeviceptr address, uint64_t bytes);
/* Return whether what is mapped at an address is in the host;
 * `*end` is set to the end, within `bytes`, of the addresses for which that holds. */
bool fake_memory_in_host(CUdeviceptr address, uint64_t bytes, uint64_t *end);
/* Return whether there is memory at all of these addresses. Abort if it is in the host. */
bool fake_memory_known(CUdeviceptr address, uint64_t bytes, const char *what);

#endif
