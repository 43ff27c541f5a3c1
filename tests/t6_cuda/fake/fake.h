/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A double of libcuda.so.1 for tests, on the CPU. Strict: a call that no correct client makes ends the
 * process with a message. What each file has: fake.c misuse, faults, the log; entry.c cuGetProcAddress;
 * context.c devices and contexts; green.c green contexts; stream.c streams and events; launch.c modules, functions,
 * launches; graph.c graphs and capture; memory.c memory; unified.c managed memory; tensor.c tensor maps.
 *
 * Environment: FAKE_DEVICES=n        GPUs (1) FAKE_MEMORY=bytes     memory of each (1 GiB)
 * FAKE_FAIL=name:n[:code][,...]  the nth call of `name` (1 is the first; 0 is every one) answers code (2, out
 * of memory) FAKE_LOG=path         one line for every call that FAKE(name) begins: "name thread"
 * FAKE_ALIASES=1       cuGetProcAddress gives other pointers than dlsym, which are only good to look at
 * FAKE_KERNEL_US=n      each kernel takes at least that long
 * FAKE_OFFSETS=1      cuMemMap takes offsets that are not 0 (the driver's page says that it does not)
 * FAKE_SMS=n            SMs of a GPU (132), split into groups of 8 FAKE_GREEN=0      without green contexts
 * FAKE_QUEUE=n           a launch, or an event, waits while so much is pending in its stream (0: it does not)
 * FAKE_BUSY=path        while that is there, cuMemCreate takes as long as it does where others have the driver busy
 *
 * A "kernel" is a C function of the test program, void name(void **parameters), found by its name in
 * cuModuleGetFunction, with its parameters' sizes in `const size_t name_parameters[]`, 0 last (found as name
 * ## _parameters; absent: none). As on a GPU, it gets copies of the parameters, made at launch.
 */
#ifndef FAKE_H
#define FAKE_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_EXPORT __attribute__((visibility("default"))) CUresult

/* First in every entry point: logs the call, checks that cuInit was called, and carries out FAKE_FAIL. */
#define FAKE(name)						\
	do {							\
		CUresult fault_ = fake_fault(#name);		\
		if (fault_ != CUDA_SUCCESS)			\
			return fault_;				\
	} while (0)

/* CUDA_SUCCESS, or what FAKE_FAIL wants for this call. */
CUresult fake_fault(const char *name);
/* What a correct client never does: a message on stderr, and abort(). */
void fake_die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
/* The number in environment variable `name`. */
uint64_t fake_number(const char *name, uint64_t otherwise);

/* The current context; NULL: none. Its device. */
CUcontext fake_context(void);
CUdevice fake_device_of(CUcontext context);
int fake_devices(void);

/* The stream that `stream` means for this thread in the current context: 0 and 1 the legacy one, 2, and 0
 * with `per_thread`, the thread's own. Dies for a destroyed one. */
struct fake_stream *fake_stream(CUstream stream, bool per_thread);
CUcontext fake_stream_context(struct fake_stream *stream);

/*
 * Queues work(argument) behind what the stream has. If it is being captured it becomes a node of the graph
 * instead, and is run, with the same argument, at every launch: so `argument` may be freed by `done` only
 * (called when the work has run, or when the node or its last executable graph is destroyed; may be NULL). An
 * error (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the legacy stream, while a stream that waits for it is captured)
 * is for the caller to return; `done` was called then. `type` is CU_GRAPH_NODE_TYPE_MEMCPY, _MEMSET, _HOST...
 */
CUresult fake_enqueue(struct fake_stream *stream, CUgraphNodeType type, void (*work)(void *), void *argument,
		      void (*done)(void *));
bool fake_capturing(struct fake_stream *stream);

/* Waits until everything queued so far has run. Dies where the stream, or one of the context, is being captured. */
void fake_drain_stream(struct fake_stream *stream);
void fake_drain_context(CUcontext context);
/* An entry point that a capture in global mode (of any thread, or thread-local of this) forbids, unless
 * this thread's mode is relaxed: returns CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and invalidates it; the
 * caller returns that. */
CUresult fake_unsafe(void);

/* Memory: called by cuCtxDestroy and its like, when nothing is queued any more (memory.c). */
void fake_memory_context_gone(CUcontext context);

#endif
