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

void gate_enter(void);
void gate_leave(void);

/* Stops newcomers and waits until nobody is inside and no stream is being captured; false, and open
 * again, if that takes longer than `timeout_ms`. One closer at a time: others wait. Nothing that
 * was submitted before is waited for. */
bool gate_close(unsigned int timeout_ms);
void gate_open(void);

/* Around calls that wait for work, or ask whether it is done: the gate is no matter to them. */
void gate_wait_enter(void);
void gate_wait_leave(void);
/* Has those wait as well, with the gate closed and nothing running: false, and all as before, if one is in such a call for
 * longer than `timeout_ms`. */
bool gate_stand(unsigned int timeout_ms);
void gate_go_on(void);

/* A stream capture began or ended (stream.c). What is captured runs later, so the gate
 * cannot close meanwhile. */
void gate_capture(int change);
/* Whether some stream is being captured: a context with one must not be waited for
 * (cuCtxSynchronize). */
bool gate_capturing(void);

#endif
