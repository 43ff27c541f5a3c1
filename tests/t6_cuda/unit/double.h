/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A double of daemon.c without a socket: books with one limit, and a thread in the place of the listening
 * one. Strict: what no correct client does ends the process.
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

/* Ends the test, unless. */
#define CHECK(condition)								\
	do {										\
		if (!(condition)) {							\
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);	\
			exit(1);							\
		}									\
	} while (0)

/* The limit from now on: what is above is moved out, or what is below in, by the time this returns (as far
 * as it goes). */
void double_limit(uint64_t limit);
/* The same, and nothing moves for it by itself. */
void double_bound(uint64_t limit);
/* Whether anything may be in the host: gmem.swap.max. */
void double_swap(bool allowed);
/* RECLAIM and ROOM, outside of any limit; the bytes moved. */
uint64_t double_out(struct device *device, uint64_t bytes);
uint64_t double_in(struct device *device, uint64_t bytes);
/* PREPARE, likewise. */
uint64_t double_prepare(struct device *device, uint64_t bytes);
/* What exchange.c has the listening thread do. */
uint64_t double_exchange(struct device *device, uint64_t bytes);
/* exchange_tick. */
void double_tick(struct device *device);
/* How much it said, at most, may be off the GPU for a moment. */
uint64_t double_away(void);
/* Checks that the books here, those of `device`, and what the driver's double has are the same. */
void double_agree(struct device *device);
/* The bytes that have moved, all orders together. */
struct double_moved {
	uint64_t out, in;
};
struct double_moved double_moved(void);
/* How often mover_out was asked. */
unsigned int double_reclaims(void);

#endif
