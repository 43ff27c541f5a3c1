/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors of memory that can be waited for, as the driver's own can: a socket, with the descriptor of that memory in
 * flight to it. Its peer, which is here, sees when it is closed for the last time.
 */
#ifndef FAKE_LEASE_H
#define FAKE_LEASE_H

#include <stdbool.h>

struct lease;

/* A new descriptor of what `fd` is of; it is the first of `leases`. */
int lease_make(struct lease **leases, int fd);
/* The first of some leases is of other memory, too. */
void lease_share(const struct lease *leases, struct lease **other);
/* Whether one of them is open; those that are not are dropped. */
bool lease_any(struct lease **leases);
/* What a descriptor is of, by another of one's own; also of one that is not made here. Less than 0: it is none. */
int lease_open(int fd);

#endif
