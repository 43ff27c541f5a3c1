/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Elastic allocations: a reserved range of addresses, backed by chunks that are on the GPU or in pinned host
 * memory, at the same address. Chunks have the sizes of pool.h, the large ones first; what is smaller than
 * one shares it (small.h).
 */
#ifndef GGROUP_CUDA_REGION_H
#define GGROUP_CUDA_REGION_H

#include "device.h"
#include "pool.h"

enum chunk_place { CHUNK_DEVICE, CHUNK_HOST };

struct chunk {
	CUmemGenericAllocationHandle memory;
	CUdeviceptr window;	/* of a chunk in the host: see pool.h */
	uint32_t heat;		/* how often it was used of late; halved by every look */
	uint8_t place;		/* enum chunk_place */
	bool busy;		/* the mover has it */
	bool pinned;		/* never moves: mapped by a peer, exported, registered */
	bool shareable;		/* other processes may have it mapped (ipc.h) */
	bool imported;		/* by a descriptor: it cannot be exported (departure.h) */
};

struct small;

struct region {
	struct region *next, *previous;	/* of the device: a ring */
	CUdeviceptr address;
	size_t bytes;		/* as asked for */
	size_t reserved;	/* of addresses, and of memory behind all of them */
	uint64_t serial;	/* no two allocations of the process have the same */
	struct device *device;
	CUcontext context;	/* it was allocated in, and goes with */
	struct small *small;	/* what is in it, if it is one for small allocations */
	struct region *next_small;
	bool freeing;		/* somebody is at it */
	size_t count[CLASSES];	/* of chunks of each class, in this order */
	size_t chunks;		/* all of them */
	struct chunk chunk[];
};

/* One chunk that the mover is to move. */
struct pick {
	struct region *region;
	size_t index;
};

/* What is known about an allocation. */
struct region_about {
	CUdeviceptr start;
	size_t bytes;		/* as asked for */
	uint64_t serial;
	struct device *device;
	CUcontext context;
	struct {		/* what holds it: other allocations may be there too */
		CUdeviceptr address;
		size_t bytes;
		uint64_t serial;
	} region;
};

/* Memory on `device` in the current context, charged. CUDA_ERROR_OUT_OF_MEMORY where the books or the
 * driver refuse it. `alignment`: 0 or a power of 2. Waits in the daemon: not inside the gate. */
CUresult region_alloc(struct device *device, size_t bytes, size_t alignment, CUdeviceptr *address);
/* CUDA_ERROR_INVALID_VALUE for an address that is not the start of one of ours (the caller then asks the driver). The
 * caller has made sure that nothing in flight uses it (cuMemFree waits; see memory.c). */
CUresult region_free(CUdeviceptr address);

/* The allocation that holds `address`, as cuMemGetAddressRange tells it. */
bool region_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes, struct device **device);
bool region_about(CUdeviceptr address, struct region_about *about);
/* Whether an address may be in one of ours: false is certain. Lock-free. */
bool region_near(CUdeviceptr address);
/* Something used [address, address + bytes), or what begins around `address`. Any address; lock-free. */
void region_use(CUdeviceptr address, size_t bytes);
void region_use_from(CUdeviceptr address);
/* Keeps what holds [address, address + bytes) where it is from now on, on the GPU. */
CUresult region_pin(CUdeviceptr address, size_t bytes);
/* From now on everything on `device` can be used by `peer` too, and stays on the GPU. */
CUresult region_peer(struct device *device, CUdevice peer);

/* Bytes of `device` in regions on the GPU that are pinned. */
uint64_t region_pinned(struct device *device);

size_t chunk_bytes(const struct region *region, size_t index);
size_t chunk_offset(const struct region *region, size_t index);
enum chunk_class chunk_class(const struct region *region, size_t index);
/* The access that a region has, for cuMemSetAccess; `access` has room for GG_DEVICES. Returns how many. */
size_t region_access(const struct region *region, CUmemAccessDesc *access);

/*
 * For the mover: the coldest on the GPU, the hottest in the host, those in the host in
 * [address, address + bytes). Chunks of about `want` bytes, in the order of their addresses within a region; at most
 * `most` of them. They are busy, so that nobody frees them, until region_put says otherwise.
 */
size_t region_pick_out(struct device *device, size_t want, struct pick *picks, size_t most);
size_t region_pick_in(struct device *device, size_t want, struct pick *picks, size_t most);
size_t region_pick_range(CUdeviceptr address, size_t bytes, struct pick *picks, size_t most);
/* ... those on the GPU there that other processes can, or cannot, map; in `serial`, if that is not 0. */
size_t region_pick_shareable(CUdeviceptr address, size_t bytes, uint64_t serial, bool can, struct pick *picks,
			     size_t most);
/* ... those that were imported, on a GPU or in the host. */
size_t region_pick_imported(struct device *device, enum chunk_place place, size_t want, struct pick *picks, size_t most);
/* ... all of them, to be freed by the caller: 0; EBUSY while somebody is at one of them, EOPNOTSUPP where one may be
 * mapped by others, ENOMEM. */
int region_pick_all(struct device *device, struct pick **picks, size_t *count);
void region_put(const struct pick *picks, size_t count);

/*
 * Turns uses into heat; false: too few were counted yet for what was used as often as something else to look
 * like it. `must`: turns them all the same, since nobody uses anything that often.
 */
bool region_look(struct device *device, bool must);
/* Bytes in the host that are so much hotter than as many on the GPU that they should change places; `most`
 * of them. */
size_t region_misplaced(struct device *device, size_t most);
/* A chunk that is busy has moved: what is behind it now. */
void region_moved(const struct pick *pick, enum chunk_place place, CUmemGenericAllocationHandle memory,
		  CUdeviceptr window);
/* ... and other processes can map it, or it was imported. */
void region_shareable(const struct pick *pick);
void region_imported(const struct pick *pick);
/* Whether anything of a device was. */
bool region_has_imported(struct device *device);
/* The bytes on the GPU, by the class of their chunks. */
void region_classes(struct device *device, uint64_t resident[CLASSES]);

#endif
