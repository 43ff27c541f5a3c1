/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gate: work goes to the GPU through it, and waits before it while memory moves.
 *
 * Entering costs a few nanoseconds while it is open (no shared cache line is written). A thread
 * that is inside may enter again, even while the gate is closing. After fork() a child has an open,
 * empty gate.
 */
#ifndef GGROUP_CUDA_GATE_H
#define GGROUP_CUDA_GATE_H

#include <stdbool.h>
#include <stdint.h>

void gate_enter(void);
void gate_leave(void);
/* Whether the calling thread is inside more than once: leaving would not bring it outside. */
bool gate_nested(void);

/* Stops newcomers and waits until no thread is inside and no stream is being captured; false, and open
 * again, if that takes longer than `timeout_ms`. One closer at a time: others wait. Nothing that
 * was submitted before is waited for. */
bool gate_close(unsigned int timeout_ms);
/* The same, but those that are still inside then are waited for while `patient` says so: it is asked every few milliseconds,
 * with how many there are, and newcomers wait meanwhile. */
bool gate_close_patiently(unsigned int timeout_ms, bool (*patient)(unsigned int inside, void *argument), void *argument);
void gate_open(void);
/* From here to the other the calling thread, if it is inside, waits for what may be closing the gate: that gives up. */
void gate_beg(void);
void gate_beg_no_more(void);

/* Waits until every other thread that is inside now has left, while the gate stays open; false if that takes longer
 * than `timeout_us`. So what the caller wrote before (atomically, __ATOMIC_SEQ_CST) is seen by each thread that is
 * inside afterwards. By one thread at a time. */
bool gate_pass(uint64_t timeout_us);

/* Around calls that wait for work, or ask whether it is done: the gate is no matter to them. */
void gate_wait_enter(void);
void gate_wait_leave(void);
/* Has those wait as well, with the gate closed and nothing running: false, and all as before, if one is in such a call
 * for longer than `timeout_ms`. */
bool gate_stand(unsigned int timeout_ms);
void gate_go_on(void);

/* A stream capture began or ended (stream.c). What is captured runs later, so the gate
 * cannot close meanwhile. */
void gate_capture(int change);
/* Whether some stream is being captured: a context with one must not be waited for
 * (cuCtxSynchronize). */
bool gate_capturing(void);

#endif
