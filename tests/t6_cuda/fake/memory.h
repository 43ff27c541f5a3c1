/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the double that have to do with memory share. */
#ifndef FAKE_MEMORY_H
#define FAKE_MEMORY_H

#include "fake.h"

struct CUmemPoolHandle_st {
	CUdevice device;
	uint64_t used;		/* under the lock of memory.c */
	uint64_t threshold;
	uint64_t accessible;	/* a bit a device */
	uint64_t read_only;	/* of those */
	bool shareable, imported;
};

/* Linear: rows side by side, levels behind one another. */
struct CUarray_st {
	CUdeviceptr data;	/* 0: the program maps memory of its own */
	size_t width;		/* bytes */
	struct tile *tiles;	/* what it has mapped */
};

/* An allocation of the driver's own. */
enum fake_memory_kind {
	FAKE_PLAIN,
	FAKE_MANAGED,
	FAKE_OF_GRAPH,	/* of a node of a graph: counted nowhere */
	FAKE_IMPORTED,	/* of a pool: it counts where it was allocated */
};
CUresult fake_allocate(CUdeviceptr *ptr, size_t bytes, enum fake_memory_kind kind, CUmemoryPool pool);
/* False: there is none that begins there. */
bool fake_deallocate(CUdeviceptr address);
/* The bytes of one; 0: there is none that begins there. */
uint64_t fake_allocated(CUdeviceptr address, CUmemoryPool *pool);

/* The managed allocation that has an address, and its number; false: there is none. */
bool fake_managed(CUdeviceptr address, uint64_t *start, uint64_t *bytes, uint64_t *id);

/* A multicast object: a handle without memory of its own. What is bound to it lives until it is unbound, or the object is
 * gone. */
CUmemGenericAllocationHandle fake_memory_multicast(uint64_t bytes);
/* False: it does not end within the object. */
bool fake_memory_bind(CUmemGenericAllocationHandle object, uint64_t offset, CUmemGenericAllocationHandle handle, uint64_t from,
		      uint64_t bytes, const char *what);
/* False: nor that, or these addresses are not of one piece of memory. */
bool fake_memory_bind_at(CUmemGenericAllocationHandle object, uint64_t offset, CUdeviceptr address, uint64_t bytes,
			 const char *what);
/* False: there is none that was bound so. */
bool fake_memory_unbind(CUmemGenericAllocationHandle object, uint64_t offset, uint64_t bytes, const char *what);
/* Memory that lives until it is let go, as if it were mapped. Dies where it is no handle, or not on a GPU. */
struct memory *fake_memory_keep(CUmemGenericAllocationHandle handle, uint64_t offset, uint64_t bytes, const char *what);
void fake_memory_let_go(struct memory *memory);
/* A descriptor of what is mapped at these addresses; less than 0: nothing is. */
int fake_memory_lease(CUdeviceptr address, uint64_t bytes);
/* Whether something is at all of these addresses. Dies where it is in the host. */
bool fake_memory_known(CUdeviceptr address, uint64_t bytes, const char *what);

#endif
