/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a generator knows of the memory that it has made: physical memory and where it is mapped, and allocations; what is in
 * all of it, and what has to stay on the GPU.
 */
#ifndef UNIT_MODEL_H
#define UNIT_MODEL_H

#include "double.h"

#define PAGE GG_CHUNK
#define PAGES_MOST 20
#define THINGS 24
#define ARENA 128	/* pages */
#define PLAINS 16
#define GPUS 2

/* A word at the beginning and the end of each page, once it has been written. */
struct contents {
	unsigned int users;
	bool written[PAGES_MOST];
	uint64_t word[PAGES_MOST];
};

/* Physical memory, or a multicast object: it has a handle, is mapped, or is bound to something. */
struct thing {
	CUmemGenericAllocationHandle name;
	size_t pages, held, seen, bound;	/* seen: views; bound: to multicast objects and arrays */
	bool exportable, by_driver, stays;	/* by_driver: never an object of the library */
	bool multicast, added;			/* added: it has its GPUs */
	struct contents *contents;		/* NULL: of a multicast object */
};

/* A mapping of some of it. */
struct seen {
	struct thing *thing;	/* NULL: no view */
	size_t start, pages, offset;
	CUmemAccess_flags flags[GPUS];
};

/* Up to OWN: ours to place, and to move. OWN, and from OF_POOL on: of pools that are not the default one. */
enum plain_kind { PLAIN, STREAMED, OWN, MANAGED, OF_POOL, IMPORTED };

/* An allocation, which has an address from the beginning. */
struct plain {
	CUdeviceptr address;	/* 0: none */
	enum plain_kind kind;
	size_t bytes;
	bool stays;
	size_t pool;		/* of OWN, OF_POOL and IMPORTED: its number */
	struct contents contents;
	uint64_t tail;		/* the last word; 0: none yet */
};

struct model {
	struct device *device;
	CUcontext context, other;	/* of the GPU that memory moves on; of another */
	CUstream streams[2];
	CUdeviceptr arena;
	struct thing things[THINGS];
	struct seen views[ARENA];	/* by the page of the arena that each begins at */
	struct seen *at_page[ARENA];
	struct plain plains[PLAINS];
	uint64_t renamed;		/* handles that are names of ours */
	uint64_t checked, checked_in_host;	/* pages */
};
extern struct model model;

/* Numbers below `below`: the generator's, the same for a seed; and others, of any thread. */
void model_seed(uint64_t seed);
uint64_t model_any(uint64_t below);
uint64_t model_odd(uint64_t below);

CUdeviceptr model_address(size_t page);
bool model_lives(const struct thing *thing);
/* One at random for which `is` says so, NULL: there is none. */
struct thing *model_thing_that(bool (*is)(const struct thing *));
struct plain *model_plain_that(bool (*is)(const struct plain *));
/* ... that has a handle. */
struct thing *model_thing(void);
struct thing *model_free_thing(void);
struct seen *model_view(void);
/* Pages of views that are neighbours, from one on, some or all of them. */
size_t model_span(const struct seen *first);
struct plain *model_plain(void);
struct plain *model_free_plain(void);

/* A new handle: no other thing has it for its name. */
void model_named(const struct thing *thing);
/* The program may have let go of all of it. */
void model_settle(struct thing *thing);

/* Where memory is, by its type; -1: it is an allocation of the driver's own. */
int model_place(CUdeviceptr address);
void model_write_view(void);
void model_write_plain(void);
/* Contents, places, access of what is looked at, which is a few things, or all; and the books. */
void model_check_some(void);
void model_check_all(void);

#endif
