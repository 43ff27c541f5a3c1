/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program's own physical memory: made by cuMemCreate on a GPU, and mapped by the program itself (view.h).
 *
 * Until it moves for the first time, all of it is behind one handle of the driver, and the program has that handle's
 * value. From then on it is a region like any other: chunks, each on the GPU or in the host, mapped at all its views.
 * The handle is released, since its memory goes with it, and the value that the program has becomes a name of the
 * library's. The driver may give that value out again: the new handle then gets another name (names.h).
 *
 * The library releases the handle once the program has released it as often as it got it, has none of the memory
 * mapped, and none is bound (binding.h).
 *
 * A thread of the program that changes anything about an object claims it first: all its chunks are busy then, and none
 * is moved.
 */
#ifndef GGROUP_CUDA_OBJECT_H
#define GGROUP_CUDA_OBJECT_H

#include "chunk.h"

struct view;

struct object {
	CUmemGenericAllocationHandle name;	/* the value that the program has */
	CUmemGenericAllocationHandle whole;	/* the driver's handle; 0: the memory is in chunks */
	uint64_t held;				/* number of times that the program may release it */
	CUmemAllocationProp prop;		/* as the program asked for it */
	struct view *views;
	unsigned int claims;			/* under the lock of the tree: by the claiming thread, and by a batch */
};

/* Return whether a region is behind the driver's own handle. With the lock of the tree, or a chunk of the region. */
static inline bool object_is_whole(const struct region *region)
{
	return region->object && region->object->whole;
}

/* Return whether memory with these properties can move. */
bool object_can_move(const struct device *device, size_t bytes, const CUmemAllocationProp *prop,
		     unsigned long long flags);
/* Make an object, charged. Waits for the daemon. */
CUresult object_create(struct device *device, size_t bytes, const CUmemAllocationProp *prop,
		       CUmemGenericAllocationHandle *name);

/* Return whether a value is the name of an object. */
bool object_is(CUmemGenericAllocationHandle name);
/* Claim the object with that name, or the one that is mapped at an address; NULL for none. */
struct region *object_claim(CUmemGenericAllocationHandle name);
struct region *object_claim_at(CUdeviceptr address);
/* Claim it once more, for a batch, in the thread that has it: each claim is let go of, in any order. */
void object_claim_again(struct region *region);
/* Let go of a claimed object; frees it if the program has neither a handle nor a view any more, and it is not bound. */
void object_put(struct region *region);
/* Unbind an object once. */
void object_unbind(struct region *region);

/* Claim all objects that are mapped in [address, address + bytes), or none. */
struct object_range {
	struct view **views;	/* the views there, by address */
	size_t count;
	bool parted;		/* the range begins or ends within a view */
	bool failed;		/* without memory for this: nothing is claimed */
};
struct object_range object_claim_range(CUdeviceptr address, size_t bytes);
/* Let go of them, as object_put. */
void object_put_range(struct object_range *range);
/* Hide views that the driver is about to unmap: after that, others may be mapped there, and must be found. */
void object_unmap_range(struct object_range *range);
/* Remove the views if they were unmapped, else show them again. Lets go of the objects. */
void object_unmapped_range(struct object_range *range, bool unmapped);

/* The mapping of an object at an address. */
struct mapped {
	struct device *device;
	CUdeviceptr start;
	size_t bytes;		/* of the mapping */
	uint64_t serial;	/* of the object */
	unsigned long long handle_types;
};
bool object_mapped(CUdeviceptr address, struct mapped *mapped);

/* Keep an object where it is from now on. By the thread that has claimed it. */
void object_pin(struct region *region);
/* Pin objects that a network device could reach without a call of CUDA, where the program has one open (outside.h). */
void object_pin_reachable(struct device *device);

/* Note that chunks replace the driver's handle, which is returned. By the thread that has all the chunks. */
CUmemGenericAllocationHandle object_part(struct region *region);
/* Note that a handle of the driver's replaces the chunks. */
void object_join(struct region *region, CUmemGenericAllocationHandle whole);

#endif
