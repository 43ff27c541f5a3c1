/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gates of turns, one per GPU. While a gate is closed, the program waits for its turn on that GPU and launches
 * nothing there. Memory can still be moved, allocated and freed, and work can be waited for: these pass another gate
 * (gate.h), or none.
 *
 * While all gates are open, no run-ahead is bounded and the program goes behind no other, a launch pays one relaxed
 * load of one word for this. In a process that has several GPUs, and takes turns on one of them, each launch asks the
 * driver for the GPU of its stream. After fork() the gates are open in the child.
 */
#ifndef GGROUP_CUDA_TURN_H
#define GGROUP_CUDA_TURN_H

#include "detour.h"
#include "device.h"
#include "gate.h"

/* Kinds of work about to go to a GPU. Run-ahead is bounded for what is counted (counters.h): kernels. A wait for an
 * event may take its stream into a capture, and there is no telling which capture the event belongs to; so such waits
 * pass while any stream is being captured. */
enum turn_work { TURN_KERNELS, TURN_OTHER, TURN_JOINS };

/* Atomically: number of GPUs whose gate is closed, or where run-ahead is bounded or the program goes behind another. */
extern unsigned int turn_any;

/* Called inside the gate, before work goes to `stream`. If the program has no turn there, or is too far ahead, leaves
 * the gate, waits, and enters again. Returns whether it has waited. Never waits in a thread that is inside more than
 * once, nor for work that is being captured. */
bool turn_hold(enum turn_work work, CUstream stream, bool per_thread);

/* Chunks that are bare (bare.h), on all GPUs; atomically. */
extern unsigned int turn_bare;
/* Covers them: of `device`, or of all GPUs where that is NULL. Set by bare.c; does nothing before. */
extern void (*turn_covers)(struct device *device);
/* The same for all GPUs, and nothing more is bare in their current gaps. By a thread inside the gate. */
void turn_cover_all(void);
/* Whether what goes out on `device` may be bare: nothing runs in the current gap between two turns, and nothing was
 * to be covered in it. */
bool turn_may_bare(const struct device *device);

/* gate_enter for a call that has the driver look at an address: what is there is mapped until gate_leave. */
static inline void turn_look(void)
{
	gate_enter();
	if (__builtin_expect(__atomic_load_n(&turn_bare, __ATOMIC_RELAXED) != 0, 0))
		turn_cover_all();
}

/* gate_enter for work that goes into all streams of `context`; NULL: the current one. Left by turn_leave_context. */
void turn_enter_context(CUcontext context);
void turn_leave_context(CUcontext context);

/* gate_enter for work that goes to a GPU; left by turn_leave. The stream is home then, except for kernels, which may go
 * away again (detour.h). */
static inline void turn_enter(enum turn_work work, CUstream stream, bool per_thread)
{
	gate_enter();
	/* Relaxed is enough: gate_pass orders this for all threads that enter after it. */
	if (__builtin_expect(__atomic_load_n(&turn_any, __ATOMIC_RELAXED) != 0, 0))
		turn_hold(work, stream, per_thread);
	if (work != TURN_KERNELS && detour_on())
		detour_home(stream, per_thread);
}

/* Leave, behind work that was put into the stream as the program named it. A kernel that went away leaves by
 * gate_leave. */
static inline void turn_leave(CUstream stream, bool per_thread)
{
	if (detour_on())
		detour_worked(stream, per_thread);
	gate_leave();
}

/* turn_end and turn_begin are called by one thread at a time, the listening thread. */

/* Ends the turn on `device`: closes the gate, and waits for at most `timeout_us`, or a second, until nothing runs
 * there. `drained` says whether that was reached. If the gate is closed already, waits again. Returns 0 with the gate
 * closed; EBUSY with the gate open while a stream is being captured; EOPNOTSUPP with the gate open if no memory there
 * is the library's to move. */
int turn_end(struct device *device, uint64_t timeout_us, bool *drained);
/* Begins a turn: opens the gate. `run_ahead_us`: time that pending kernels may take before the next is launched; 0: as
 * much as the driver allows. */
void turn_begin(struct device *device, uint64_t run_ahead_us);

/* Whether the turn is over, so that the program waits for its next one. */
bool turn_is_over(const struct device *device);
/* Whether the program takes turns: its turn is over, or its run-ahead is bounded. */
bool turn_is_one(const struct device *device);
/* The number of the current gap between two turns, if nothing runs in it; else 0. */
uint64_t turn_gap(const struct device *device);
/* Whether the turn is over and something was still running at the last turn_end; then there is no use waiting until
 * nothing runs. */
bool turn_is_late(const struct device *device);
/* Bounds run-ahead, as turn_begin does, while memory waits for a queue to finish (calm.h); the lower of the two bounds
 * applies. 0: ends that. By the holder of the mover's lock. */
void turn_bound(struct device *device, uint64_t run_ahead_us);
/* Opens the gate of a device, or all gates, and removes the bounds of turns. */
void turn_open(struct device *device);
void turn_open_all(void);
/* Watches what finishes of the work launched before the end of a turn, for at most a millisecond: the daemon goes by
 * what is pending. False, at once, if nothing is pending, or has been watched for long. By the listening thread. */
bool turn_watch(void);
/* Makes the program go behind others on `device` (burst.h). `run_ahead_us`: time that its pending work, including the
 * running kernel, may still take when the next kernel is launched, in microseconds; more once it has not been held for
 * long (hold.h). 0: it goes behind none. By the listening thread. */
void turn_yield(struct device *device, uint64_t run_ahead_us);
/* Number of threads that wait there: for their turn, because they are too far ahead, or for programs that go before. */
unsigned int turn_waiting(const struct device *device);

#endif
