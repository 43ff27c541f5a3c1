/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waiting until nothing runs on a GPU: the contexts that are used there, and a wait for all of them, with a deadline.
 */
#ifndef GGROUP_CUDA_QUIET_H
#define GGROUP_CUDA_QUIET_H

#include "device.h"

/* Note that `context` works on `device`, so that its work is waited for. Cheap where that is known. With too many
 * contexts, nothing of the device moves any more. */
void quiet_context(struct device *device, CUcontext context);

/* Between these two calls `context` may be destroyed by the calling thread, which is inside the gate: no thread of the
 * library is in it meanwhile, to wait for work there. Returns once none is. One context at a time. */
void quiet_context_ends(CUcontext context);
void quiet_context_ended(void);

/* With the gate closed, or that of turns (turn.h): wait until nothing runs. False where something does not end within
 * `timeout_us`, or cannot be waited for. */
bool quiet_wait(struct device *device, uint64_t timeout_us);
/* Wait in this thread for all that was submitted, for as long as that takes, as cuMemFree does. Not during a
 * capture. */
CUresult quiet_drain(struct device *device);

/* Return whether the GPU has reached an event of the library, or the end of a stream; the third waits for the event. An
 * error that stays is one of the context, where nothing runs any more. An error that passes says nothing, and memory
 * that is freed after it may be in use. */
bool quiet_passed(CUevent event);
bool quiet_ended(CUstream stream);
void quiet_await(CUevent event);

#endif
