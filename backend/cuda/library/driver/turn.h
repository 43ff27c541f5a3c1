/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gates of turns, one a GPU: while one is closed the program waits for its turn there, and launches nothing. Memory
 * moves meanwhile, is allocated and freed, and work is waited for: those go by another gate (gate.h), or by none.
 *
 * While all are open, no run-ahead is bounded, and the program goes behind no other, a launch pays for this with one
 * relaxed load of one word. In a process that has more than one GPU, and a turn on one of them, each launch asks the
 * driver for the GPU of its stream. After fork() a child has open gates.
 */
#ifndef GGROUP_CUDA_TURN_H
#define GGROUP_CUDA_TURN_H

#include "device.h"
#include "gate.h"

/* What is about to go to the GPU. Run-ahead is bounded for what is counted (counters.h): kernels. A wait for an event
 * may take its stream into a capture, and nothing tells of which one the event is: those pass while any stream is
 * captured. */
enum turn_work { TURN_KERNELS, TURN_OTHER, TURN_JOINS };

/* Atomically: GPUs whose gate of turns is closed, where run-ahead is bounded, or the program goes behind another. */
extern unsigned int turn_any;

/* Inside the gate, before work goes to `stream`: comes outside, and waits, where the program has no turn there, or is
 * too far ahead; returns inside, and whether it has waited. A thread that is inside more than once, and work that is
 * captured, never wait. */
bool turn_hold(enum turn_work work, CUstream stream, bool per_thread);
/* gate_enter, for what puts work into all streams of `context`; NULL: the current one. */
void turn_enter_context(CUcontext context);

/* gate_enter, for what puts work on a GPU; left by gate_leave. */
static inline void turn_enter(enum turn_work work, CUstream stream, bool per_thread)
{
	gate_enter();
	/* Relaxed is enough: gate_pass orders it for all threads that are inside after it. */
	if (__builtin_expect(__atomic_load_n(&turn_any, __ATOMIC_RELAXED) != 0, 0))
		turn_hold(work, stream, per_thread);
}

/* The two below: by one thread at a time, the listening one. */

/* The turn on `device` is over: closes the gate, and waits until nothing runs there, for `timeout_us` or a second at
 * most; says whether that is so. Closed already: it waits again. EBUSY, and open, while a stream is being captured;
 * EOPNOTSUPP, and open, where no memory is ours to move; else 0, and closed. */
int turn_end(struct device *device, uint64_t timeout_us, bool *drained);
/* A turn begins: opens it. `run_ahead_us`: the time that pending kernels may take before the next is launched; 0: as
 * much as the driver lets it. */
void turn_begin(struct device *device, uint64_t run_ahead_us);

/* Whether it is over, and something ran still when turn_end said so last: what waits until nothing runs waits in
 * vain. */
bool turn_is_late(const struct device *device);
/* Bounds run-ahead, as turn_begin does, for as long as memory waits for a queue to get done (calm.h); the lower of both
 * bounds holds. 0: no more. By the holder of the mover's lock. */
void turn_bound(struct device *device, uint64_t run_ahead_us);
/* Opens that of a device, or all of them, and bounds nothing for a turn. */
void turn_open(struct device *device);
void turn_open_all(void);
/* Looks what finishes of what was launched before its turn was over, for a millisecond at most: the daemon goes by what
 * is pending. False, at once, where nothing is, or has been for long. By the listening thread. */
bool turn_watch(void);
/* The program goes behind others on `device` (burst.h): what waits behind a kernel of its own that runs may take so
 * long, in microseconds; 0: it goes behind none. By the listening thread. */
void turn_yield(struct device *device, uint64_t run_ahead_us);
/* Threads that wait there for their turn, since they are too far ahead, or for others that go before them. */
unsigned int turn_waiting(const struct device *device);

#endif
