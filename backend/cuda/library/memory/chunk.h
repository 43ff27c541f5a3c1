/* SPDX-License-Identifier: Apache-2.0 */
/* The chunks of a region: their sizes, their order, what is known of each. */
#ifndef GGROUP_CUDA_CHUNK_H
#define GGROUP_CUDA_CHUNK_H

#include "device.h"

/* The sizes chunks come in. Larger ones cost fewer calls to remap (2 MiB chunks: 150 ms for 4 GiB;
 * 64 MiB: 45 ms), smaller ones follow a limit and the heat more closely. */
enum chunk_class { CLASS_LARGE, CLASS_MIDDLE, CLASS_SMALL, CLASSES };
extern const uint64_t class_bytes[CLASSES];

/* Physical memory of one class, not in use by a region or in the hands of the caller. */
struct spare {
	CUmemGenericAllocationHandle memory;
	CUdeviceptr window;	/* of the host only */
};

enum chunk_place { CHUNK_DEVICE, CHUNK_HOST };

/* A sum over what is in a chunk: that of another chunk is the same only if that is equal (hash.h). */
struct mark {
	uint64_t low, high;
};

struct chunk {
	CUmemGenericAllocationHandle memory;
	CUdeviceptr window;	/* of a chunk in the host: see host.h */
	uint32_t heat;		/* how often it was used of late; halved by every look */
	uint32_t order;		/* number of its first use in the last turn that used it; 0: not in the working set
				 * (order.h) */
	uint32_t first;		/* the same of the turn that is looked at (order.c); else 0 */
	uint32_t used_at;	/* when that was: ms for which the program had run */
	uint8_t place;		/* enum chunk_place */
	bool busy;		/* the mover has it */
	bool bare;		/* atomically: in the host, and mapped nowhere but at its window (bare.h) */
	bool pinned;		/* never moves: exported, registered */
	bool reached;		/* ... by what is outside of the program: no other allocation gets it */
	bool shareable;		/* other processes may have it mapped (ipc.h) */
	bool imported;		/* by a descriptor: it cannot be exported (departure.h) */
	uint8_t changes;	/* how often in a row it was another than its copy (clean.h) */
	struct spare copy;	/* in the host, of a chunk on the GPU, as of when it came; memory 0: none */
	struct mark mark;	/* ... of that */
	struct mark now;	/* of what is in the chunk, wherever that is, in: */
	uint64_t gap;		/* ... this gap between two turns (turn.h); 0: in none */
};

struct small;
struct object;

/* Chunks that move together at most. */
#define CHUNKS_TOGETHER 512

struct region {
	struct region *next, *previous;	/* of the device: a ring */
	CUdeviceptr address;	/* 0: the program maps it itself, where `object` says */
	size_t bytes;		/* as asked for */
	size_t reserved;	/* of addresses, and of memory behind all of them */
	uint64_t serial;	/* no two allocations of the process have the same */
	struct device *device;
	CUcontext context;	/* it was allocated in, and goes with */
	struct small *small;	/* what is in it, if it is one for small allocations */
	struct region *next_small;
	struct object *object;	/* what the program made by cuMemCreate (object.h); else NULL */
	uint64_t users;		/* atomically: other GPUs that have copied to or from it, a bit an ordinal */
	bool lent;		/* the program was given a descriptor of some of it (lent.h) */
	bool freeing;		/* a thread is at it */
	bool gone;		/* it is freed, but for what is behind it, which is bound still */
	size_t bound;		/* so often (binding.h) */
	size_t count[CLASSES];	/* of chunks of each class, in this order */
	size_t chunks;		/* all of them */
	struct chunk chunk[];
};

/* One chunk that the mover is to move. */
struct pick {
	struct region *region;
	size_t index;
};

size_t chunk_bytes(const struct region *region, size_t index);
size_t chunk_offset(const struct region *region, size_t index);
enum chunk_class chunk_class(const struct region *region, size_t index);
/* The chunk of a region that an offset is in. */
size_t chunk_at(const struct region *region, size_t offset);

#endif
