/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocations smaller than a chunk: a buddy system within one chunk, for 512 bytes to 1 MiB.
 *
 * It works on offsets, without addresses or the driver, and takes no lock: region.c calls it under its own.
 */
#ifndef GGROUP_CUDA_SMALL_H
#define GGROUP_CUDA_SMALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the smallest block. cudaMalloc promises 256 (CUDA C++ Programming Guide, device memory accesses); the driver
 * gives 512, and programs that pack vectors into their allocations have come to rely on that. */
#define SMALL_UNIT UINT64_C(512)
#define SMALL_CHUNK (UINT64_C(2) << 20)
#define SMALL_UNITS (SMALL_CHUNK / SMALL_UNIT)
/* Number of orders of blocks, SMALL_UNIT << order; the last is half a chunk. */
#define SMALL_ORDERS 12
#define SMALL_MAX (SMALL_UNIT << (SMALL_ORDERS - 1))

struct small;

/* Return an empty buddy system; NULL without memory. */
struct small *small_new(void);
void small_delete(struct small *small);

/* Allocate a block of `bytes` (1 to SMALL_MAX) whose offset is a multiple of `alignment` (a power of 2 up to SMALL_MAX,
 * or 0). small_find returns its `serial`. False where it does not fit. */
bool small_alloc(struct small *small, uint64_t bytes, uint64_t alignment, uint64_t serial, uint64_t *offset);
/* Free the block at `offset`; false where none starts there. */
bool small_free(struct small *small, uint64_t offset);
/* Find the block that contains `offset` within the size asked for, before rounding. */
bool small_find(const struct small *small, uint64_t offset, uint64_t *start, uint64_t *bytes, uint64_t *serial);

/* Return the order of a block of `bytes` at `alignment`; SMALL_ORDERS or more: too large. */
unsigned int small_order(uint64_t bytes, uint64_t alignment);
/* Return the largest order with a free block: SMALL_ORDERS when all is free, -1 when all is taken. */
int small_largest(const struct small *small);

#endif
