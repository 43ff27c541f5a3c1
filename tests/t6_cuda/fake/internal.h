/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the double, except memory.c. */
#ifndef FAKE_INTERNAL_H
#define FAKE_INTERNAL_H

#include "fake.h"

/* First word of every object. Handles of destroyed objects keep it, and their memory, so that a later use is found. */
enum fake_kind {
	FAKE_CONTEXT = 0x43545800, FAKE_STREAM, FAKE_EVENT, FAKE_FUNCTION, FAKE_KERNEL, FAKE_MODULE, FAKE_LIBRARY,
	FAKE_GRAPH, FAKE_NODE, FAKE_EXEC, FAKE_DEAD,
};

/* Abort unless `handle` is a live object of that kind. `what` names the call. */
void fake_check(const void *handle, enum fake_kind kind, const char *what);
/* Allocate zeroed memory that is kept until exit. */
void *fake_object(size_t bytes, enum fake_kind kind);

/* One lock for all queued work, and one condition, broadcast whenever work has run. */
extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;

struct CUctx_st {
	enum fake_kind kind;
	CUdevice device;
	bool primary;
	bool reset;		/* a reset has destroyed its streams and events */
	struct fake_stream *legacy;
	struct fake_stream *streams;	/* all, the legacy one first */
	struct CUevent_st *events;
	/* Of a green context. */
	CUcontext parent;	/* the primary context whose code and memory it shares; NULL: it is none */
	uint64_t groups;	/* of SMs that its kernels run on; 0: all */
	CUcontext next_green;	/* atomically; of a primary context: the first of its green ones */
};

struct operation;
struct capture;

/* A CUstream is a pointer to one of these. */
struct fake_stream {
	enum fake_kind kind;
	CUcontext context;
	struct fake_stream *next;
	bool blocking;			/* waits for the legacy stream, and vice versa */
	int priority;
	bool explicit;			/* made in a green context by a call of its own */
	bool running;			/* whether its thread runs */
	bool ending;
	uint64_t queued, done;		/* operations */
	struct operation *first, *last;
	struct capture *capture;
	struct fake_stream *next_captured;
};

struct CUevent_st {
	enum fake_kind kind;
	CUcontext context;
	struct CUevent_st *next;
	struct fake_stream *stream;	/* stream of the last record; NULL: none */
	uint64_t number;		/* it has happened once the stream has done so many */
	struct capture *capture;	/* capture of the last record, if any */
	uint64_t capture_number;
};

/* A capture that is in progress, or over. */
struct capture {
	struct fake_stream *origin;
	struct fake_stream *joined;	/* the other streams, of any context */
	CUgraph graph;
	CUstreamCaptureMode mode;
	pthread_t thread;
	bool active, invalid;
	uint64_t number;
	struct capture *next;
};

/* A piece of work, shared by a graph, its copies, and queues. */
struct job {
	void (*work)(void *);
	void *argument;
	void (*done)(void *);
	int references; /* atomically */
};

struct job *fake_job(void (*work)(void *), void *argument, void (*done)(void *));
void fake_job_get(struct job *job);
void fake_job_put(struct job *job);
/* Wait until a stream has room for another launch, or an event (FAKE_QUEUE). */
void fake_room(struct fake_stream *stream);
/* Like fake_enqueue, but take a reference. fake_lock is held. */
void fake_queue(struct fake_stream *stream, struct job *job);
/* Append a node to `graph`; take a reference. */
CUgraphNode fake_graph_add(CUgraph graph, CUgraphNodeType type, struct job *job);
/* Append a kernel node, with the answer of cuGraphKernelNodeGetParams. */
void fake_graph_node_kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params);

/* Return a launch as a job; NULL and `error` if it is invalid. */
struct job *fake_launch_job(CUfunction function, void **parameters, void **extra, CUresult *error);
/* Return its parameters, as an array of pointers that lives as long as the job. */
void **fake_launch_parameters(struct job *job);
CUresult fake_enqueue_job(struct fake_stream *stream, CUgraphNodeType type, struct job *job,
			  const CUDA_KERNEL_NODE_PARAMS *kernel);

/* Return the capture that a use of the stream would disturb now; NULL for none. fake_lock is held. */
struct capture *fake_in_the_way(struct fake_stream *stream);

/* First answer of a call in a checkpointed process; may wait, or end the process. */
CUresult fake_while_checkpointed(const char *name);

/* Return the SMs of so many groups as a mask has; of 0, all of the GPU. */
unsigned int fake_sms(uint64_t groups);
/* Note on which groups the kernels of this thread run from now on. */
void fake_run_on(uint64_t groups);
/* Return the context that work in a context belongs to: the primary one of a green one, else itself. */
CUcontext fake_family(CUcontext context);
/* Make a stream (stream.c), and a context; retain and release the primary context of a device (context.c). */
struct fake_stream *fake_stream_make(CUcontext context, bool blocking, int priority);
CUcontext fake_context_make(CUdevice device);
CUcontext fake_primary_retain(CUdevice device);
void fake_primary_release(CUdevice device);
void fake_context_destroy(CUcontext context);

/* Return whether this process has called cuInit. */
bool fake_initialised(void);
/* End everything in a context. */
void fake_end_streams(CUcontext context);
/* Load the library of CUDA_INJECTION64_PATH, as cuInit does. */
void fake_inject(void);

#endif
