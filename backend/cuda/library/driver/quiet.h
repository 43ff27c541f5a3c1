/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Until nothing runs on a GPU: the contexts that are used there, and waiting for all of them, with a deadline.
 */
#ifndef GGROUP_CUDA_QUIET_H
#define GGROUP_CUDA_QUIET_H

#include "device.h"

/* `context` works on `device`: what runs in it is waited for. Cheap where it is known. Where there are too many,
 * nothing of the device moves any more. */
void quiet_context(struct device *device, CUcontext context);

/* From here to the other `context` may be destroyed, by the calling thread, which is inside the gate: no thread of ours is in
 * it meanwhile, to wait for what runs there. Returns once none is. One context at a time. */
void quiet_context_ends(CUcontext context);
void quiet_context_ended(void);

/* With the gate closed, or that of turns (turn.h): waits until nothing runs. False: something does not end within
 * `timeout_us`, or cannot be waited for. */
bool quiet_wait(struct device *device, uint64_t timeout_us);
/* Waits for all that was submitted, in this thread, for as long as that takes: what cuMemFree does. Not
 * during a capture. */
CUresult quiet_drain(struct device *device);

/* Whether the GPU has come to an event of ours, or to the end of a stream, without waiting, and an event with. An error that
 * stays is one of the context, where nothing runs any more; one that does not says nothing, and what is to be freed after
 * that may be in use. */
bool quiet_passed(CUevent event);
bool quiet_ended(CUstream stream);
void quiet_await(CUevent event);

#endif
