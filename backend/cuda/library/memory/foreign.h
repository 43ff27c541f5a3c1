/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the GPU that the driver places and we cannot move: what is fixed of the program's own cuMemCreate, pools
 * of its own that are not ours (source.h), arrays, everything with GGROUP_CUDA_IPC=1. It is charged, and named in
 * gmem.stat (device->foreign). Managed memory is named only where it is not ours to limit (unified.h): where it is, is
 * up to the driver, and more of it than the GPU has is no error.
 */
#ifndef GGROUP_CUDA_FOREIGN_H
#define GGROUP_CUDA_FOREIGN_H

#include "device.h"
#include "driver.h"

struct foreign;

/* Charges `bytes` that are about to be allocated; CUDA_ERROR_OUT_OF_MEMORY where that is refused.
 * Waits. NULL: no device of ours, nothing is charged. */
CUresult foreign_charge(struct device *device, uint64_t bytes);
/* They were not allocated after all, or are freed. */
void foreign_uncharge(struct device *device, uint64_t bytes);

/* `key`, an address or a handle, stands for bytes charged before; they are
 * uncharged once that is freed (foreign_take). */
void foreign_is(struct device *device, uint64_t key, uint64_t bytes, CUcontext context);
/* The same for managed memory, which is not charged. */
void foreign_is_managed(struct device *device, uint64_t key, uint64_t bytes, CUcontext context);
/* What `key` stands for, which the driver is about to free: as soon as it has, the key may be another's. NULL: nothing
 * is known of it. */
struct foreign *foreign_take(uint64_t key);
/* It is freed; or is not, and `key` stands for it again. */
void foreign_taken(struct foreign *taken, uint64_t key, bool freed);

/* The program's own physical memory: it lives while it has a handle or is mapped somewhere. */
void foreign_created(struct device *device, CUmemGenericAllocationHandle handle, uint64_t bytes);
void foreign_retained(CUmemGenericAllocationHandle handle, CUdeviceptr mapped_at);
void foreign_mapped(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle handle);
/* What a handle stands for that the driver is about to release, once; as foreign_take. */
struct foreign *foreign_release(CUmemGenericAllocationHandle handle);
void foreign_released(struct foreign *memory, CUmemGenericAllocationHandle handle, bool released);
/* Mappings that the driver is about to take away; as foreign_take. */
struct foreign *foreign_unmap(CUdeviceptr address, uint64_t bytes);
void foreign_unmapped(struct foreign *mappings, bool unmapped);

/* ... or is bound to something: that has it until foreign_unbind (binding.h). NULL: nothing is known of it. */
struct foreign *foreign_bind(CUmemGenericAllocationHandle handle);
struct foreign *foreign_bind_at(CUdeviceptr address);
/* The same once more, of one that is bound. */
void foreign_bind_again(struct foreign *memory);
struct device *foreign_device(const struct foreign *memory);
void foreign_unbind(struct foreign *memory);

/* A multicast object: as physical memory, but there is none. `gone` is called, with the number that stands for it, once
 * the program has neither a handle of it nor a mapping, unless it was exported. */
void foreign_is_multicast(CUmemGenericAllocationHandle handle, uint64_t number, void (*gone)(uint64_t number));
/* The number of one that was made here; else its handle. */
uint64_t foreign_multicast(CUmemGenericAllocationHandle handle);
/* What a handle stands for, on `device`, is memory of this program, imported by a descriptor that it was given of it:
 * that lives by it, too (lent_import, whose name it is). */
void foreign_is_import(struct device *device, CUmemGenericAllocationHandle handle, uint64_t name);
/* Other processes may have what a handle stands for: by a descriptor; -1: in another way. */
void foreign_exported(CUmemGenericAllocationHandle handle, int fd);
/* ... what is mapped, or allocated, at an address. */
void foreign_exported_at(CUdeviceptr address, int fd);

/* An allocation of the driver's own, that `key` tells afterwards: charged before, or undone. */
#define FOREIGN(result, device, bytes, key, name, arguments)					\
	do {											\
		(result) = foreign_charge((device), (bytes));					\
		if ((result) == CUDA_SUCCESS) {							\
			CALL_REAL(result, name, arguments);					\
			if ((result) == CUDA_SUCCESS)						\
				foreign_is((device), (uint64_t)(key), (bytes), driver_context()); \
			else									\
				foreign_uncharge((device), (bytes));				\
		}										\
	} while (0)

/* The program has made, or made a pool of, memory of its own in the host by virtual memory management: whether it ever
 * did. The driver does not restore that after a checkpoint. */
void foreign_made_in_host(const CUmemLocation *location);
bool foreign_is_in_host(void);

/* Memory of a GPU, of the program or of another process, was made known to both: whether any ever was. */
void foreign_share(void);
bool foreign_is_shared(void);

#endif
