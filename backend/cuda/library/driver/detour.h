/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels on some SMs of a GPU alone, while the program's streams stay what they are.
 *
 * With a limit of SMs in force, a kernel that the program launches in a stream goes to another one in the library's
 * place of it: a stream of a green context (green.h) on the groups that the limit names. The program's stream is away
 * then. Two events join the two: on the way out the other stream waits for what the program's has, and on the way home
 * the program's waits for the other. A stream goes home before anything but a kernel is put into it or asked of it, so
 * copies, events, waits, callbacks and captures are in the program's stream, and in order; kernels one after another
 * are launched away without a join between them.
 *
 * The legacy stream keeps its meaning: before work of its own all blocking streams of its context go home, and before
 * work of theirs the legacy stream does. A thread's own stream (CU_STREAM_PER_THREAD) goes home after each kernel, as
 * no other thread can name it.
 *
 * Several threads may use one stream: between the moment that one has brought it home and that of its copy, another may
 * send it away. So each thread notes its copy once it is in the stream, and the next kernel joins the two again.
 *
 * What cannot go there runs in the program's stream on all SMs, and is counted: graphs whose kernels cannot be placed,
 * cooperative kernels and clusters that do not fit, launches in contexts other than the primary one, launches in the
 * legacy stream while a stream is captured, and whatever the driver refuses there.
 *
 * While no GPU has had a limit, a launch pays one relaxed load for this.
 */
#ifndef GGROUP_CUDA_DETOUR_H
#define GGROUP_CUDA_DETOUR_H

#include "device.h"
#include "green.h"

struct line;

/* A launch that goes to another stream. */
struct detour {
	CUstream stream;	/* to launch in */
	struct green *green;	/* on which SMs that is */
	struct line *line;	/* of the program's stream: locked from detour_begin to detour_end */
};

/* Atomically: number of GPUs with a limit, and of those whose streams may still be away. */
extern unsigned int detour_any;

/* Atomically: whether a stream has ever been away, or was about to be. */
extern bool detour_known;

static inline bool detour_on(void)
{
	return __builtin_expect(__atomic_load_n(&detour_any, __ATOMIC_RELAXED) != 0, 0);
}

/* Set the groups that the kernels of a device may use; 0: all SMs. It acts on the next launch. 0, or EOPNOTSUPP (there
 * are no green contexts), EINVAL (there are no such groups). By the listening thread, which never waits for a launch
 * here. */
int detour_limit(struct device *device, uint64_t mask);
/* Destroy the green contexts of a device without a limit, on which nothing runs. By the listening thread. */
void detour_release(struct device *device);
/* Return the groups, as detour_limit set them. */
uint64_t detour_mask(CUdevice ordinal);

/* The following are called inside the gate, only if detour_on(). */

/* Whether a kernel fits on so many SMs, which are those of `stream`. */
typedef bool detour_fits(unsigned int sms, CUstream stream, void *argument);

/* Begin a launch in `stream`, whose work is not captured. Return whether it goes to detour->stream; if not, it is
 * launched as it was asked for, in order. */
bool detour_begin(struct detour *detour, CUstream stream, bool per_thread, detour_fits *fits, void *argument);
/* End it. Return false if the launch failed there, and is to be launched as it was asked for. */
bool detour_end(struct detour *detour, CUresult result);

/* Begin a launch that can run on all SMs alone. */
void detour_stay(CUstream stream, bool per_thread);

/* Bring home what work in `stream`, or a question about it, has to come behind. In a thread of the program. */
void detour_home(CUstream stream, bool per_thread);
/* Work has been put into `stream` at home, or into all streams of a context: kernels that come now are behind it, also
 * where another thread has sent the stream away since it was brought home. */
void detour_worked(CUstream stream, bool per_thread);
void detour_worked_context(CUcontext context);
/* Do the same for all streams of a context. */
void detour_home_context(CUcontext context);
/* Do the same for all streams of all contexts: before a capture, and before waits of the library. */
void detour_home_all(void);
/* Bring one stream of a context home, for a marker in it; in any thread, its context current. False, at once, while a
 * thread launches there. */
bool detour_home_at_once(CUstream stream, CUcontext context);

/* The following are called whether or not there is a limit. */

/* A stream of the program is about to be destroyed. */
void detour_stream_ends(CUstream stream);
/* A context may be about to be destroyed: no green context of its GPU is left to keep it, and none is made until
 * detour_context_ended. */
void detour_context_ends(CUcontext context);
void detour_context_ended(CUcontext context, bool gone);

#endif
