/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Until nothing runs on a GPU: the contexts that are used there, and waiting for all of them, with a deadline.
 */
#ifndef GGROUP_CUDA_QUIET_H
#define GGROUP_CUDA_QUIET_H

#include "state.h"

struct quiet;

/* With `context`, the first that is used; NULL without memory. */
struct quiet *quiet_new(CUcontext context);
/* A context is used from now on, or is gone. Cheap where it is known; false: there are too many. */
bool quiet_context(struct quiet *quiet, CUcontext context);
void quiet_context_gone(struct quiet *quiet, CUcontext context);

/* With the gate closed: waits until nothing runs. False: something does not end within `timeout_ms`, or
 * cannot be waited for. */
bool quiet_wait(struct quiet *quiet, unsigned int timeout_ms);
/* Waits for all that was submitted, in this thread, for as long as that takes: what cuMemFree does. Not
 * during a capture. */
CUresult quiet_drain(struct quiet *quiet);

#endif
