/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elastic allocations: a reserved range of addresses, backed by chunks that are on the GPU or in pinned host memory, at
 * the same address. Chunks have the sizes of pool.h, the large ones first; allocations smaller than a chunk share one
 * (small.h).
 */
#ifndef GGROUP_CUDA_REGION_H
#define GGROUP_CUDA_REGION_H

#include "device.h"
#include "pool.h"

/* The description of an allocation. */
struct region_about {
	CUdeviceptr start;
	size_t bytes;		/* as asked for */
	uint64_t serial;
	struct device *device;
	CUcontext context;
	struct {		/* the region around it, which may hold other allocations too */
		CUdeviceptr address;
		size_t bytes;
		uint64_t serial;
	} region;
};

/* Allocate memory on `device` in the current context, charged. CUDA_ERROR_OUT_OF_MEMORY where the books or the driver
 * refuse it. `alignment`: 0 or a power of 2. Waits for the daemon: not inside the gate. */
CUresult region_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address);
/* Wait for what runs on the GPU of a region, and on the others that use it. Within driver_enter, and no capture. */
CUresult region_drain(struct device *device, CUdeviceptr address);
/* Free the allocation that starts at an address. CUDA_ERROR_INVALID_VALUE where none of the library's does (the caller
 * then asks the driver). The caller has made sure that no work in flight uses it (cuMemFree waits; see memory.c). */
CUresult region_free(CUdeviceptr address);
/* Unbind a region once (binding.h): memory of a region that was freed meanwhile is given back with the last binding. */
void region_unbind(struct region *region);

/* Find the allocation that contains `address`, as cuMemGetAddressRange returns it. */
bool region_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes, struct device **device);
bool region_about(CUdeviceptr address, struct region_about *about);
/* Have what is around an address stay mapped while the driver is asked about it, until gate_leave, if it may be in
 * a region; false: it is not. Otherwise as turn_look: programs ask about addresses of the host all the time. */
bool region_look(CUdeviceptr address);
/* Note that the program was given a descriptor of a range (lent.h); false where no region is there. */
bool region_given(CUdeviceptr address, size_t bytes, int fd);
/* Return the number of bytes from an address on that are one piece of memory to the driver; 0 where no region is
 * there. */
size_t region_piece(CUdeviceptr address);

#endif
