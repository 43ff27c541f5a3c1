/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the program has freed after it was given a descriptor of it: it lives for as long as the descriptor is
 * open, in any process or on its way to one. Until then it is charged, and named.
 *
 * The descriptors are in an epoll set of the library. The set holds no file open, and loses a file when it is closed
 * for the last time, anywhere (epoll(7)); /proc/self/fdinfo shows its content (proc(5)). Two cases remain unseen:
 * another process that has imported such memory and closed the descriptor, and one that has it by a fabric handle,
 * which is no descriptor.
 */
#ifndef GGROUP_CUDA_LENT_H
#define GGROUP_CUDA_LENT_H

#include "device.h"

/* Names of memory: of a region, by its serial; of foreign memory, by a number of its own. */
#define LENT_REGION(serial) ((serial) << 1)
#define LENT_HELD LENT_FOREIGN(UINT64_C(0))	/* for held memory of another process */
#define LENT_FOREIGN(number) ((number) << 1 | 1)

/* Note that the program was given a descriptor of that memory. False: it cannot be watched. */
bool lent_give(uint64_t name, int fd);
/* Keep a descriptor that came from another process, which sees that; the second closes it, unless the program has: its
 * number may be another file's by then. Less than 0: there is none. */
int lent_hold(int fd);
void lent_let(int fd);

/* Note that the program imports a descriptor. Returns the name of the memory, if the program was given that descriptor
 * itself; the memory then also lives until lent_import_over. 0: it was not, or that cannot be seen (a copy under
 * another number, where kcmp(2) is forbidden). */
uint64_t lent_import(int fd);
void lent_import_over(uint64_t name);

/* Note that the program frees charged memory of which it was given descriptors. True: one is still open, or was
 * imported here; the memory stays charged, and the caller must not uncharge it. */
bool lent_keep(struct device *device, uint64_t name, uint64_t bytes);
/* Uncharge memory of which no descriptor is open any more; returns whether there was some. */
bool lent_sweep(void);
/* Return whether some memory may still live by a descriptor. */
bool lent_any(void);
/* Sweep now and then. Returns milliseconds until the next call; less than 0: nothing is lent. */
int64_t lent_tick(void);

#endif
