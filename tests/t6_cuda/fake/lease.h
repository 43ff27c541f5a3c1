/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors of memory whose last close can be awaited, as the driver does it: a socket, with the descriptor of the
 * memory in flight to it. Its peer, which is here, sees the last close.
 */
#ifndef FAKE_LEASE_H
#define FAKE_LEASE_H

#include <stdbool.h>

struct lease;

/* Make a new descriptor of what `fd` refers to; it becomes the first of `leases`. */
int lease_make(struct lease **leases, int fd);
/* Make the first of some leases one of other memory as well. */
void lease_share(const struct lease *leases, struct lease **other);
/* Make all leases of some memory leases of other memory. */
void lease_move(struct lease **leases, struct lease **other);
/* Return whether one of them is open; drop those that are not. */
bool lease_any(struct lease **leases);
/* Return a descriptor of our own for what a lease refers to, even one that was not made here; negative for none. */
int lease_open(int fd);

#endif
