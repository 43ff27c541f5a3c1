/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts of kernels submitted and finished, of this process on one GPU (Ghost, section 4.3).
 *
 * A kernel is counted as submitted at its launch. Finished kernels are learnt from events. An event is recorded behind
 * a launch, at most every 2 ms a stream, or more often while run-ahead is bounded (device.h); and once more when a
 * stream with unmarked launches has been quiet for that long. So the count is exact after idle, and at most that late
 * before.
 */
#ifndef GGROUP_CUDA_COUNTERS_H
#define GGROUP_CUDA_COUNTERS_H

#include "device.h"

/* Count `kernels` launched on `stream` of the current context, on `device`, which device_current has found. Inside the
 * gate, after the launch succeeded. */
void counters_launched(struct device *device, CUstream stream, bool per_thread, uint64_t kernels);

/* Note that a stream is about to be destroyed: what it has not finished is still waited for. */
void counters_stream_gone(CUstream stream);
/* Note that a context may be about to be destroyed: nothing of it is touched until it is gone (and counted as finished)
 * or stays. */
void counters_context_held(CUcontext context);
void counters_context_gone(CUcontext context);
void counters_context_stays(CUcontext context);

/*
 * Note that a capture is about to begin in `stream`, or that it has ended there, or did not begin (stream.c keeps count
 * of captures). While any is active, the launching thread places a marker behind every launch: another stream may join
 * a capture at any time by cuStreamWaitEvent, and a marker must not become part of the graph.
 */
void counters_capture_begins(CUstream stream, bool per_thread);
void counters_capture_ended(CUstream stream, bool per_thread);

/* Look which markers have passed, and place those that are due. Returns milliseconds until the next call is due, -1
 * when there is nothing to wait for. Called by the listening thread (daemon.c). */
int counters_tick(void);
/* With nothing more being launched on `device`: place the last markers, and return whether all has finished. Work that
 * is not counted may still run. In any thread of the library. */
bool counters_drain(struct device *device);
/* Note that all that was launched on `device` has run, as its contexts say. No marker is placed there from here to the
 * next launch: it would wait for the next turn, and so would every wait for the contexts. */
void counters_all_finished(struct device *device);
/* Return whether anything on `device` finished since the last look. In any thread of the library. */
bool counters_progress(struct device *device);
/* Place a marker now behind the calling thread's launches in `stream`, instead of up to 2 ms later. */
void counters_mark(CUstream stream, bool per_thread);
/* Wakes the listening thread when there is something to wait for again. Set by daemon.c; NULL while there is no such
 * thread. */
extern void (*counters_wake)(void);

#endif
