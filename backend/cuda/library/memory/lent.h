/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the program has let go of, and that others may have still, by a descriptor that it was given: the memory
 * lives for as long as that is open, in a process or on its way to one. So long it is charged, and named.
 *
 * The descriptors are in an epoll set of ours. That holds no file open, and loses one when it is closed for the last
 * time, wherever that is (epoll(7)); what is in it /proc/self/fdinfo tells (proc(5)). Another process that has imported such
 * memory, and closed the descriptor, is not seen; nor is one that has it by a handle for a fabric, which is none.
 */
#ifndef GGROUP_CUDA_LENT_H
#define GGROUP_CUDA_LENT_H

#include "device.h"

/* Names of memory: of a region, by its serial; of what is foreign, by a number of its own. */
#define LENT_REGION(serial) ((serial) << 1)
#define LENT_HELD LENT_FOREIGN(UINT64_C(0))	/* what is held of another process's */
#define LENT_FOREIGN(number) ((number) << 1 | 1)

/* The program was given a descriptor of that memory. False: that cannot be watched, and is not known. */
bool lent_give(uint64_t name, int fd);
/* Keeps a descriptor that came from another process, which sees that; and closes it, unless the program has: its number may
 * be another file's by then. Less than 0: there is none. */
int lent_hold(int fd);
void lent_let(int fd);

/* The program has imported what a descriptor is of: its name, if it is memory that it was given that descriptor of, which lives
 * from then on until lent_import_over, too. 0: it is not, or that cannot be seen (a copy of it under another number, where
 * kcmp(2) is forbidden). */
uint64_t lent_import(int fd);
void lent_import_over(uint64_t name);

/* The program lets go of memory of which it was given descriptors, and which is charged: it stays so, and this is in the place
 * of what would uncharge it, if one of them is open still, or was imported here. */
bool lent_keep(struct device *device, uint64_t name, uint64_t bytes);
/* Uncharges what no descriptor is open of any more; whether there was some. */
bool lent_sweep(void);
/* Whether others may have some, still. */
bool lent_any(void);
/* The same as lent_sweep, once in a while: milliseconds until it is to be called again; less than 0: nothing is lent. */
int64_t lent_tick(void);

#endif
