/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels submitted and finished, of this process on one GPU (Ghost, section 4.3).
 *
 * Submitted is counted at launch. Finished is learnt from events, recorded behind a launch at most
 * every 2 ms a stream, or more often while run-ahead is bounded (device.h), and once more when a
 * stream with unmarked launches has been quiet for that long; so it is exact after idle, and at most
 * that late before.
 */
#ifndef GGROUP_CUDA_COUNTERS_H
#define GGROUP_CUDA_COUNTERS_H

#include "device.h"

/* `kernels` were launched on `stream` of the current context, on `device`. Inside the gate, after
 * the launch succeeded. */
void counters_launched(struct device *device, CUstream stream, bool per_thread, uint64_t kernels);

/* A stream is about to be destroyed: what it has not finished is still waited for. */
void counters_stream_gone(CUstream stream);
/* A context may be about to be destroyed: nothing of it is touched until it is gone (and counted as
 * finished) or stays. */
void counters_context_held(CUcontext context);
void counters_context_gone(CUcontext context);
void counters_context_stays(CUcontext context);

/*
 * A capture is about to begin in `stream`, or has ended there, or did not begin (stream.c, which
 * knows how many there are). While any is active a marker is placed behind every launch by the
 * thread that made it, since another stream may join a capture at any time by cuStreamWaitEvent,
 * and a marker must not become part of the graph.
 */
void counters_capture_begins(CUstream stream, bool per_thread);
void counters_capture_ended(CUstream stream, bool per_thread);

/* Looks which markers have passed and places those that are due; returns the milliseconds
 * until it wants to be called again, -1 when there is nothing to wait for. Called by the
 * listening thread (daemon.c). */
int counters_tick(void);
/* With nothing launched on `device` any more: has it known when all of it has finished, and says whether it has. What
 * is not counted may run still. In any thread of ours. */
bool counters_drain(struct device *device);
/* All that was launched on `device` has run, as its contexts say. No marker of it is placed from here to the next
 * launch: it would wait for the next turn, and have all wait that wait for the contexts. */
void counters_all_finished(struct device *device);
/* Whether anything on `device` was finished since the last look. In any thread of ours. */
bool counters_progress(struct device *device);
/* Has it known of what this thread launched in `stream` when it finishes, and not up to 2 ms later. */
void counters_mark(CUstream stream, bool per_thread);
/* Wakes that thread: there is something to wait for again. Set by daemon.c; NULL while
 * there is no thread. */
extern void (*counters_wake)(void);

#endif
