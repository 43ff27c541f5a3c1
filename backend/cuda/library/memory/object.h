/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The program's own physical memory: what it has made by cuMemCreate on a GPU, and maps itself (view.h).
 *
 * Until it moves for the first time the driver's own handle is behind all of it, and the program has that handle's value.
 * Then it is a region as any other: chunks, each on the GPU or in the host, mapped at all its views; the handle is
 * released, since the memory goes with it, and the value that the program has is a name of ours. The driver
 * may give that value out again: what has it then gets another name (names.h).
 *
 * The handle is released by us, once the program has let go of all that it had, and mapped none of it any more; nor is any of it
 * bound to something (binding.h).
 *
 * A thread of the program that changes anything of an object claims it first: all its chunks are busy then, and none is
 * moved.
 */
#ifndef GGROUP_CUDA_OBJECT_H
#define GGROUP_CUDA_OBJECT_H

#include "chunk.h"

struct view;

struct object {
	CUmemGenericAllocationHandle name;	/* as the program has it */
	CUmemGenericAllocationHandle whole;	/* the driver's; 0: chunks are behind it */
	uint64_t held;				/* by the program: so often may it release it */
	CUmemAllocationProp prop;		/* as it asked for it */
	struct view *views;
	unsigned int claims;			/* under the lock of the tree: of the thread that has claimed it, of a batch */
};

/* Whether the driver's own handle is behind a region. With the lock of the tree, or a chunk of the region. */
static inline bool object_is_whole(const struct region *region)
{
	return region->object && region->object->whole;
}

/* Whether memory that is asked for like this can move. */
bool object_can_move(const struct device *device, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags);
/* Makes it, charged. Waits in the daemon. */
CUresult object_create(struct device *device, size_t bytes, const CUmemAllocationProp *prop,
		       CUmemGenericAllocationHandle *name);

/* Whether a value is the name of one. */
bool object_is(CUmemGenericAllocationHandle name);
/* Claims the one with that name, or that is mapped at an address; NULL: there is none. */
struct region *object_claim(CUmemGenericAllocationHandle name);
struct region *object_claim_at(CUdeviceptr address);
/* ... once more, for a batch, by the thread that has: each lets go of it, whichever is the last. */
void object_claim_again(struct region *region);
/* Lets go of one that is claimed; frees it if the program has neither a handle nor a view any more, and nothing else has it
 * bound. */
void object_put(struct region *region);
/* It is bound once less. */
void object_unbind(struct region *region);

/* Claims all that are mapped in [address, address + bytes), or none. */
struct object_range {
	struct view **views;	/* what of them is mapped there, by address */
	size_t count;
	bool parted;		/* the range ends, or begins, within one */
	bool failed;		/* there is no memory for this: nothing is claimed */
};
struct object_range object_claim_range(CUdeviceptr address, size_t bytes);
/* Lets go of them, as object_put. */
void object_put_range(struct object_range *range);
/* The driver is about to unmap them: as soon as it has, others may be mapped there, and are found. */
void object_unmap_range(struct object_range *range);
/* It is unmapped; or is not, and is found again. Lets go of them. */
void object_unmapped_range(struct object_range *range, bool unmapped);

/* What is known of an address where one is mapped. */
struct mapped {
	struct device *device;
	CUdeviceptr start;
	size_t bytes;		/* of the mapping */
	uint64_t serial;	/* of the object */
	unsigned long long handle_types;
};
bool object_mapped(CUdeviceptr address, struct mapped *mapped);

/* Keeps one on the GPU from now on, wherever it is now. By the thread that has claimed it. */
void object_pin(struct region *region);
/* Those that a network device could reach without a call of CUDA, where the program has one open (outside.h). */
void object_pin_reachable(struct device *device);

/* Chunks have taken the place of the driver's handle, which is returned. By the thread that has all the chunks. */
CUmemGenericAllocationHandle object_part(struct region *region);
/* A handle of the driver's has taken their place. */
void object_join(struct region *region, CUmemGenericAllocationHandle whole);

#endif
