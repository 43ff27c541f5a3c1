/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of the library do when a device or a context comes or goes, and in a child of fork(). A part says so
 * itself, by one LIFE in its file; no file knows all of them.
 *
 * The order in which the parts are asked is that of enum life_stage, for every event. Within a stage there is none:
 * parts that need one another have different stages.
 */
#ifndef GGROUP_CUDA_LIFE_H
#define GGROUP_CUDA_LIFE_H

#include "api.h"

struct device;

enum life_stage {
	LIFE_CALLS,	/* the gate, stream capture, graphs: they have nothing of a device */
	LIFE_COUNTS,	/* kernels that are counted */
	LIFE_CONTEXTS,	/* the contexts to wait for (quiet.c): first of all that have something of a device */
	LIFE_CHUNKS,	/* physical memory (pool.c) */
	LIFE_KEEPER,	/* ... and the thread that makes it ahead */
	LIFE_REGIONS,	/* what is backed by it */
	LIFE_STREAMED,	/* stream-ordered allocations: those whose region went with its context are forgotten */
	LIFE_FOREIGN,	/* memory that others place: the driver's, and that of other processes */
	LIFE_MOVES,	/* what moves chunks of regions */
	LIFE_DAEMON,	/* the connection: it hears of a device that is complete */
	LIFE_STAGES
};

/* NULL: the part has nothing to do then. */
struct life {
	enum life_stage stage;
	/* A device is used for the first time; its first context is current, or there is none yet; `elastic` and
	 * `host_node` are set. Only where it is elastic; after an error it is so no longer, and later stages are not asked. */
	CUresult (*set_up)(struct device *device);
	/* The device can be found from now on. */
	void (*known)(struct device *device);
	/* A context is used on a device; for the first time by this thread, since a context went. */
	void (*context_used)(struct device *device, CUcontext context);
	/* The context was destroyed, and with it what the program allocated in it; called inside the gate, for each
	 * device, with possibly no context current. `device->primary` is NULL already if it was that one. */
	void (*context_gone)(struct device *device, CUcontext context);
	/* In the child of fork(): every struct device is gone (leaked), no call of the driver may be made. */
	void (*forget)(void);
};

/* A pointer to it lies in a section of its own: all of them are there before any code runs. */
#define LIFE(...)									\
	static const struct life life = { __VA_ARGS__ };				\
	static const struct life *const life_here					\
		__attribute__((section("ggroup_life"), used)) = &life

CUresult life_set_up(struct device *device);
void life_known(struct device *device);
void life_context_used(struct device *device, CUcontext context);
void life_context_gone(struct device *device, CUcontext context);
void life_forget(void);

#endif
