/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Allocations smaller than a chunk: a buddy system inside of one, 512 bytes to 1 MiB.
 *
 * It knows offsets only, no addresses and no driver, and takes no lock: region.c calls it under its own.
 */
#ifndef GGROUP_CUDA_SMALL_H
#define GGROUP_CUDA_SMALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* cudaMalloc promises 256 (CUDA C++ Programming Guide, device memory accesses); the driver gives 512, and
 * programs that pack vectors into what they get have come to rely on it. */
#define SMALL_UNIT UINT64_C(512)
#define SMALL_CHUNK (UINT64_C(2) << 20)
#define SMALL_UNITS (SMALL_CHUNK / SMALL_UNIT)
/* Orders of blocks: SMALL_UNIT << order; the last is half a chunk. */
#define SMALL_ORDERS 12
#define SMALL_MAX (SMALL_UNIT << (SMALL_ORDERS - 1))

struct small;

/* An empty one; NULL without memory. */
struct small *small_new(void);
void small_delete(struct small *small);

/* A block of `bytes` (1 to SMALL_MAX) whose offset is a multiple of `alignment` (a power of 2 up to SMALL_MAX, or 0).
 * `serial` comes back from small_find. False where it does not fit. */
bool small_alloc(struct small *small, uint64_t bytes, uint64_t alignment, uint64_t serial, uint64_t *offset);
/* False unless a block starts at `offset`. */
bool small_free(struct small *small, uint64_t offset);
/* The block that holds `offset`: among the bytes asked for, not those it was rounded up by. */
bool small_find(const struct small *small, uint64_t offset, uint64_t *start, uint64_t *bytes, uint64_t *serial);

/* The order that `bytes` at `alignment` take; SMALL_ORDERS or more: too large for this. */
unsigned int small_order(uint64_t bytes, uint64_t alignment);
/* The largest order there is a free block of: SMALL_ORDERS when all is free, -1 when all is taken. */
int small_largest(const struct small *small);

#endif
