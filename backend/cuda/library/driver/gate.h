/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate: threads pass it to give the GPU work, and wait before it while memory moves.
 *
 * Entering costs a few nanoseconds while it is open (no shared cache line is written). A thread that is inside may
 * enter again, even while the gate is closing. After fork() a child has an open, empty gate.
 */
#ifndef GGROUP_CUDA_GATE_H
#define GGROUP_CUDA_GATE_H

#include <stdbool.h>
#include <stdint.h>

void gate_enter(void);
void gate_leave(void);
/* Return whether the calling thread is inside more than once, so that leaving would not bring it outside. */
bool gate_nested(void);

/* Stop newcomers and wait until no thread is inside and no stream is being captured. Return false, with the gate open
 * again, if that takes longer than `timeout_ms`. One closer at a time: further ones wait. Work that was submitted
 * before is not waited for. */
bool gate_close(unsigned int timeout_ms);
/* Do the same, but go on waiting for threads that are inside after that while `patient` returns true. It is called
 * every few milliseconds, with their number; newcomers wait meanwhile. */
bool gate_close_patiently(unsigned int timeout_ms, bool (*patient)(unsigned int inside, void *argument),
			  void *argument);
void gate_open(void);
/* Between these two calls the calling thread, if it is inside, waits for a thread that may be closing the gate: the
 * closing is given up then. */
void gate_beg(void);
void gate_beg_no_more(void);

/* Wait until every other thread that is inside now has left, while the gate stays open; false if that takes longer than
 * `timeout_us`. So each thread that is inside afterwards sees what the caller wrote before (atomically,
 * __ATOMIC_SEQ_CST). By one thread at a time. */
bool gate_pass(uint64_t timeout_us);

/* Mark calls that wait for work, or ask whether it is done. A closed gate does not stop them. */
void gate_wait_enter(void);
void gate_wait_leave(void);
/* Stop these calls, too, with the gate closed and nothing running. Return false, with everything as before, if one
 * takes longer than `timeout_ms`. */
bool gate_stand(unsigned int timeout_ms);
void gate_go_on(void);

/* Count a stream capture that began (1) or ended (-1) (stream.c). Captured work runs later, so the gate cannot close
 * meanwhile. */
void gate_capture(int change);
/* Return whether some stream is being captured: its context must not be waited for (cuCtxSynchronize). */
bool gate_capturing(void);

#endif
