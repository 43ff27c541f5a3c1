/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A double of daemon.c without a socket: books with one limit, and a thread in place of the listening one. It is
 * strict: anything that a correct client does not do ends the process.
 */
#ifndef UNIT_DOUBLE_H
#define UNIT_DOUBLE_H

#include "device.h"
#include "driver.h"
#include "mover.h"
#include "host.h"
#include "pool.h"
#include "region.h"

#include <stdio.h>
#include <stdlib.h>

/* Ends the test unless the condition holds. */
#define CHECK(condition)								\
	do {										\
		if (!(condition)) {							\
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);	\
			exit(1);							\
		}									\
	} while (0)

/* Sets the limit. By the time this returns, memory above it has been moved out, or memory below it in, as far as
 * possible. */
void double_limit(uint64_t limit);
/* Sets the limit, and moves nothing. */
void double_bound(uint64_t limit);
/* Sets whether any memory may be in the host: gmem.swap.max. */
void double_swap(bool allowed);
/* RECLAIM and ROOM, regardless of the limit; return the bytes moved. */
uint64_t double_out(struct device *device, uint64_t bytes);
uint64_t double_in(struct device *device, uint64_t bytes);
/* PREPARE, likewise. */
uint64_t double_prepare(struct device *device, uint64_t bytes);
/* The exchange that exchange.c has the listening thread do. */
uint64_t double_exchange(struct device *device, uint64_t bytes);
/* Calls exchange_tick. */
void double_tick(struct device *device);
/* The most bytes that the library reported as off the GPU for a moment. */
uint64_t double_away(void);
/* Checks that the books here, those of `device` and those of the driver's double agree. */
void double_agree(struct device *device);
/* Bytes moved, by all orders together. */
struct double_moved {
	uint64_t out, in;
};
struct double_moved double_moved(void);
/* Number of calls of mover_out. */
unsigned int double_reclaims(void);

#endif
