/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life cycle of devices and contexts: what each part of the library does when one comes or goes, and in a child of
 * fork(). A part registers itself by one LIFE in its file; no file knows all of them.
 *
 * Parts are called in the order of enum life_stage, for every event. Within a stage there is no order: parts that need
 * one another have different stages.
 */
#ifndef GGROUP_CUDA_LIFE_H
#define GGROUP_CUDA_LIFE_H

#include "api.h"

struct device;

enum life_stage {
	LIFE_CALLS,	/* the gate, stream capture, graphs: they keep nothing of a device */
	LIFE_COUNTS,	/* counts of kernels */
	LIFE_CONTEXTS,	/* the contexts to wait for (quiet.c): first of those that keep something of a device */
	LIFE_CHUNKS,	/* physical memory (pool.c) */
	LIFE_KEEPER,	/* the thread that makes physical memory ahead */
	LIFE_REGIONS,	/* the program's memory, backed by physical memory */
	LIFE_STREAMED,	/* stream-ordered allocations: those whose region went with its context are forgotten */
	LIFE_FOREIGN,	/* memory that the library does not place: the driver's, and that of other processes */
	LIFE_MOVES,	/* the mover of regions' chunks */
	LIFE_DAEMON,	/* the connection: it is told of devices that are complete */
	LIFE_STAGES
};

/* A part of the library; NULL for an event that it does not handle. */
struct life {
	enum life_stage stage;
	/* A device is used for the first time. Its first context is current, or there is none yet; `elastic` and
	 * `host_node` are set. Called only where it is elastic; after an error it no longer is, and later stages are
	 * not called. */
	CUresult (*set_up)(struct device *device);
	/* The device can be found from now on. */
	void (*known)(struct device *device);
	/* A context is used on a device, for the first time by this thread since a context went. */
	void (*context_used)(struct device *device, CUcontext context);
	/* A context was destroyed, and with it what the program allocated in it. Called inside the gate, for each
	 * device, possibly with no context current. `device->primary` is NULL already if it was that one. */
	void (*context_gone)(struct device *device, CUcontext context);
	/* In the child of fork(): every struct device is gone (leaked), and the driver must not be called. */
	void (*forget)(void);
};

/* Register a part: a pointer to it lies in a section of its own, so all parts are there before any code runs. */
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
