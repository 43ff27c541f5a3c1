/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Managed memory: the driver moves its pages by itself, and counts them for no program. How much of it may be on the
 * GPU is decided by advice of the library (hint.h): a piece that is to be in the host prefers to be there, and the GPU
 * uses it there (CU_MEM_ADVISE_SET_PREFERRED_LOCATION, _SET_ACCESSED_BY). All else is charged, as if it were on the
 * GPU; that is an upper bound. No gate is closed, and nothing has to rest: the driver keeps pages coherent while they
 * move.
 *
 * The program's own advice is kept beside that (shadow.h), and holds again where a piece may be on the GPU; once any of
 * an allocation was in the host, questions about it are answered from what is kept (advised.h).
 *
 * unified.c has the allocations, piece.c takes their pieces out and in.
 */
#ifndef GGROUP_CUDA_UNIFIED_H
#define GGROUP_CUDA_UNIFIED_H

#include "shadow.h"

/* Bytes that go and come together. The driver moves 2 MiB at a time. */
#define UNIFIED_PIECE (16 * GG_MIB)

enum unified_place {
	UNIFIED_ON_GPU,		/* it may be: charged */
	UNIFIED_IN_HOST,	/* by advice of the library: in the books as swapped */
	UNIFIED_REFUSED,	/* the same, from the beginning, and in no books: a limit left no room for it */
	UNIFIED_LEAVING,	/* sent out, and charged until it is known to arrive; while a thread has it to itself */
};

struct unified {
	struct device *device;
	CUcontext context;
	CUdeviceptr start;
	uint64_t bytes;
	bool touched;		/* some was in the host */
	bool busy;		/* a thread has it to itself, without the lock */
	struct shadow shadow;
	size_t count;		/* of pieces */
	unsigned char place[];	/* enum unified_place of each piece */
};

/* Begin with what the driver has placed, in a context of `device`: it is charged, and what the limits refuse is in the
 * host from the beginning. false: the library does not limit it (the GPU takes no such advice, or the daemon is an
 * older one). */
bool unified_made(struct device *device, CUdeviceptr address, uint64_t bytes, CUcontext context);
/* Take what the driver is about to free; NULL: not known here. As foreign_take. */
struct unified *unified_take(CUdeviceptr address);
void unified_taken(struct unified *taken, bool freed);
/* Return whether any of a range is of an allocation of which some was in the host. */
bool unified_touched(CUdeviceptr address, uint64_t bytes);

/* For piece.c and advised.c */

static inline CUdeviceptr unified_piece(const struct unified *unified, size_t piece)
{
	return unified->start + piece * UNIFIED_PIECE;
}

static inline uint64_t unified_piece_bytes(const struct unified *unified, size_t piece)
{
	const uint64_t left = unified->bytes - piece * UNIFIED_PIECE;

	return left < UNIFIED_PIECE ? left : UNIFIED_PIECE;
}

/* Return the bytes that a piece counts in the books. */
static inline uint64_t unified_piece_charge(const struct unified *unified, size_t piece)
{
	return (unified_piece_bytes(unified, piece) + GG_CHUNK - 1) / GG_CHUNK * GG_CHUNK;
}

/* Return whether there may be any allocation. */
bool unified_any(void);
/* Have bytes of managed memory charged; false: the daemon refuses. */
bool unified_charge(struct device *device, uint64_t bytes);
/* Get the allocation that a range begins in, for this thread alone; NULL: the driver is to be asked, as there is none,
 * or as nothing of it was in the host. `address` and `end` become those of its pages that are meant. */
struct unified *unified_own(CUdeviceptr *address, CUdeviceptr *end);
/* Get the next allocation of a device behind an address that has a piece in a place, for this thread alone and without
 * waiting; NULL: there is none. */
struct unified *unified_own_next(const struct device *device, CUdeviceptr address, enum unified_place place);
void unified_disown(struct unified *unified);
/* Note that some of an allocation is in the host, or was. */
void unified_touch(struct unified *unified);
/* Call `visit` for the allocation that has an address, once no thread has it to itself, in the lock. */
void unified_visit(CUdeviceptr address, void (*visit)(struct unified *, void *), void *argument);

#endif
