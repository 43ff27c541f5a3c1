/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generator's model of the memory that it has made: physical memory and its mappings, and allocations; all contents,
 * and what has to stay on the GPU.
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

/* First and last word of each page, once written. */
struct contents {
	unsigned int users;
	bool written[PAGES_MOST];
	uint64_t word[PAGES_MOST];
};

/* Physical memory, or a multicast object, which has a handle, is mapped, or is bound to something. */
struct thing {
	CUmemGenericAllocationHandle name;
	size_t pages, held, seen, bound;	/* seen: views; bound: to multicast objects and arrays */
	bool exportable, by_driver, stays;	/* by_driver: not made as an object of the library */
	bool multicast, added;			/* added: its GPUs were added */
	struct contents *contents;		/* NULL for a multicast object */
};

/* A mapping of a part of a thing. */
struct seen {
	struct thing *thing;	/* NULL: no view */
	size_t start, pages, offset;
	CUmemAccess_flags flags[GPUS];
};

/*
 * Kinds up to OWN are placed, and moved, by the library. OWN, and from OF_POOL on: from pools other than the default.
 */
enum plain_kind { PLAIN, STREAMED, OWN, MANAGED, OF_POOL, IMPORTED };

/* An allocation, which keeps its address. */
struct plain {
	CUdeviceptr address;	/* 0: none */
	enum plain_kind kind;
	size_t bytes;
	bool stays;
	size_t pool;		/* number of the pool, for OWN, OF_POOL and IMPORTED */
	struct contents contents;
	uint64_t tail;		/* the last word; 0: none yet */
};

struct model {
	struct device *device;
	CUcontext context, other;	/* of the GPU on which memory moves; of another GPU */
	CUstream streams[2];
	CUdeviceptr arena;
	struct thing things[THINGS];
	struct seen views[ARENA];	/* by the first page of each in the arena */
	struct seen *at_page[ARENA];
	struct plain plains[PLAINS];
	uint64_t renamed;		/* number of handles that are the library's own names */
	uint64_t checked, checked_in_host;	/* numbers of pages */
};
extern struct model model;

/* Random numbers below `below`: the generator's, which follow from a seed; and others, for any thread. */
void model_seed(uint64_t seed);
uint64_t model_any(uint64_t below);
uint64_t model_odd(uint64_t below);

CUdeviceptr model_address(size_t page);
bool model_lives(const struct thing *thing);
/* Return a random thing that satisfies `is`; NULL if there is none. */
struct thing *model_thing_that(bool (*is)(const struct thing *));
struct plain *model_plain_that(bool (*is)(const struct plain *));
/* Return a random thing that has a handle. */
struct thing *model_thing(void);
struct thing *model_free_thing(void);
struct seen *model_view(void);
/* Return the pages of neighbouring views, from one on, of some or all of them. */
size_t model_span(const struct seen *first);
struct plain *model_plain(void);
struct plain *model_free_plain(void);

/* Check a new handle: no other thing may have the same one. */
void model_named(const struct thing *thing);
/* Forget a thing if the program has let go of all of it. */
void model_settle(struct thing *thing);

/* Return where memory is, by its type; -1 for an allocation of the driver's own. */
int model_place(CUdeviceptr address);
void model_write_view(void);
void model_write_plain(void);
/* Check contents, place and access of a few things, or of all; and the books. */
void model_check_some(void);
void model_check_all(void);

#endif
