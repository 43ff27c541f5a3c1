/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves chunks between the GPU and the host, at the same address.
 *
 * Out: close the gate, wait for what runs, copy on the copy engine, remap, open the gate, free; the copy of
 * the next chunks overlaps the remap of the last; as much at a time as keeps the gate closed for about 25 ms,
 * or longer where the program's own kernels are long. In: the reverse, the hottest first. Called by the
 * listening thread (daemon.c), but mover_fetch.
 */
#ifndef GGROUP_CUDA_MOVER_H
#define GGROUP_CUDA_MOVER_H

#include "device.h"

/* The time of one call, microseconds: for what is left then the daemon asks again. */
#define CALL_US 2000000

/*
 * Moves at least `bytes` out, or what can be; returns the bytes moved, and the microseconds that took, but
 * those of waiting for the program. First of all the chunks that the pool keeps on the GPU unused go:
 * they are uncharged, count towards `bytes`, and are not in what it returns, for nothing of them is in the
 * host. What moved is to be booked by mover_booked.
 */
uint64_t mover_out(struct device *device, uint64_t bytes, uint64_t *usec);
/*
 * What is in the host, but on the GPU by the books: returns the bytes, which are in the host by the books
 * from now on. They are less than mover_out said where the program has freed some meanwhile, as bytes of the
 * GPU. To be called with the lock that daemon_uncharge takes, so that what is freed next is in the books
 * where it is.
 */
uint64_t mover_booked(struct device *device);
/* Those bytes: they may come back by mover_in without a word of the daemon. */
uint64_t mover_owed(struct device *device);
/* Moves up to `bytes` in, asking the daemon for room first (daemon_move_in), until that is refused. */
uint64_t mover_in(struct device *device, uint64_t bytes, uint64_t *usec);
/* ... of the working set alone, in its order (order.h). */
uint64_t mover_prepare(struct device *device, uint64_t bytes, uint64_t *usec);
/* Bytes of an object that changes places as a whole, at most: with what is wanted it is no more than the daemon
 * believes (backend/cuda/holding.py, AWAY_MOST). */
#define EXCHANGE_WHOLE_MOST (1024 * GG_MIB)
/*
 * Has about `bytes` of the hottest in the host and of the coldest on the GPU change places; returns what
 * came, and the microseconds that took, but those of waiting for the program. The books are as before: what went
 * and did not come is credit, as with mover_in.
 */
uint64_t mover_exchange(struct device *device, uint64_t bytes, uint64_t *usec);
/* Marks about `bytes` of what goes next, at the end of a turn with nothing running, so that it need not be written if
 * the host has a copy of it (clean.h). Returns the bytes. */
uint64_t mover_mark(struct device *device, uint64_t bytes);
/* Where the time of moves goes, ever, us: waiting until nothing runs, moving with the gate closed, and making memory of
 * the host. Changed by whichever thread moves; waits for that. Not while the program stands by. */
struct mover_spent {
	uint64_t waited, closed, made;
};
struct mover_spent mover_spent(struct device *device);
/* Whether nothing that was begun is still at memory: a kernel of ours, or a copy, that was waited for in vain. */
bool mover_rests(struct device *device);
/* Brings what is in [address, address + bytes) to the GPU, charged; by a thread of the program, outside the gate. */
CUresult mover_fetch(struct device *device, CUdeviceptr address, size_t bytes);

/* Has other processes be able to map what is in [address, address + bytes), which is on the GPU; as mover_fetch. */
CUresult mover_share(struct device *device, CUdeviceptr address, size_t bytes);

#endif
