/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the double share, and memory.c has no use for. */
#ifndef FAKE_INTERNAL_H
#define FAKE_INTERNAL_H

#include "fake.h"

/* The first word of every object: handles of destroyed ones keep theirs, and memory, so that a later use is found. */
enum fake_kind {
	FAKE_CONTEXT = 0x43545800, FAKE_STREAM, FAKE_EVENT, FAKE_FUNCTION, FAKE_KERNEL, FAKE_MODULE, FAKE_LIBRARY, FAKE_GRAPH,
	FAKE_NODE, FAKE_EXEC, FAKE_DEAD,
};

/* Dies unless `handle` is a live object of that kind. `what` names the call. */
void fake_check(const void *handle, enum fake_kind kind, const char *what);
/* Memory that is kept until exit, zeroed. */
void *fake_object(size_t bytes, enum fake_kind kind);

/* One lock for everything that is queued, and one condition, broadcast whenever something has run. */
extern pthread_mutex_t fake_lock;
extern pthread_cond_t fake_changed;

struct CUctx_st {
	enum fake_kind kind;
	CUdevice device;
	bool primary;
	bool reset;		/* its streams and events were destroyed with it */
	struct fake_stream *legacy;
	struct fake_stream *streams;	/* all, the legacy one first */
	struct CUevent_st *events;
};

struct operation;
struct capture;

/* A CUstream is a pointer to one of these. */
struct fake_stream {
	enum fake_kind kind;
	CUcontext context;
	struct fake_stream *next;
	bool blocking;			/* waits for the legacy stream, and it for this */
	bool running;			/* its thread */
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
	struct fake_stream *stream;	/* where it was last recorded; NULL: nowhere */
	uint64_t number;		/* it has happened once that stream has done so many */
	struct capture *capture;	/* where it was last recorded, if that was a capture */
	uint64_t capture_number;
};

/* A capture in progress, or over. */
struct capture {
	struct fake_stream *origin;
	struct fake_stream *joined;	/* the others, of any context */
	CUgraph graph;
	CUstreamCaptureMode mode;
	pthread_t thread;
	bool active, invalid;
	uint64_t number;
	struct capture *next;
};

/* Something to run: shared by a graph, its copies, and queues. */
struct job {
	void (*work)(void *);
	void *argument;
	void (*done)(void *);
	int references; /* atomically */
};

struct job *fake_job(void (*work)(void *), void *argument, void (*done)(void *));
void fake_job_get(struct job *job);
void fake_job_put(struct job *job);
/* As fake_enqueue; takes a reference. With fake_lock held. */
void fake_queue(struct fake_stream *stream, struct job *job);
/* A node of `graph`, at its end; takes a reference. */
CUgraphNode fake_graph_add(CUgraph graph, CUgraphNodeType type, struct job *job);
/* The same for a kernel: what cuGraphKernelNodeGetParams answers. */
void fake_graph_node_kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params);

/* A launch, as a job; NULL: `error`. */
struct job *fake_launch_job(CUfunction function, void **parameters, void **extra, CUresult *error);
/* The parameters in it, as an array of pointers that lives as long as the job. */
void **fake_launch_parameters(struct job *job);
CUresult fake_enqueue_job(struct fake_stream *stream, CUgraphNodeType type, struct job *job,
			  const CUDA_KERNEL_NODE_PARAMS *kernel);

/* The capture that using the stream now would be in the way of; NULL: none. With fake_lock held. */
struct capture *fake_in_the_way(struct fake_stream *stream);

/* What a process that is checkpointed answers first; may wait, or die. */
CUresult fake_while_checkpointed(const char *name);

/* Whether cuInit was called, by this process. */
bool fake_initialised(void);
/* Ends everything in a context. */
void fake_end_streams(CUcontext context);
/* The library of CUDA_INJECTION64_PATH, as cuInit does. */
void fake_inject(void);

#endif
