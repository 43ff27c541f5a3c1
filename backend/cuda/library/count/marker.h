/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Markers: the events that show how far a stream has got.
 *
 * For each stream there is the number of launches that have no marker behind them yet, and a queue of markers: events,
 * each with the number of kernels before it.
 */
#ifndef GGROUP_CUDA_MARKER_H
#define GGROUP_CUDA_MARKER_H

#include "device.h"
#include "stream.h"

struct marker;

/* A stream in which work was launched. */
struct counted {
	struct counted *next;		/* next of all streams (counters.c); never freed, but reused */
	pthread_mutex_t lock;		/* for the other fields */
	bool live;			/* it stands for `key` */
	bool gone;			/* the stream was destroyed; only its markers are left */
	bool held;			/* the context may be about to go */
	bool captured;
	bool places;			/* a marker is being placed, which may wait for room; atomic */
	struct stream_key key;
	CUcontext context;
	struct device *device;
	uint64_t kernels, launches;	/* since the last marker */
	uint64_t last, marked;		/* time of the last launch (of READ_EVERY the first), and of the last marker;
					 * us */
	uint64_t looked;		/* time at which its markers were last queried; us */
	int failures;
	struct marker *first, *newest;	/* in the order in which they pass */
	struct marker *spare;
};

/* Unless stated otherwise, these are called with the stream's lock held, in a current context that is the stream's. */

/* This thread has launched `kernels` in the stream. */
void marker_launched(struct counted *counted, uint64_t kernels);
/* Places a marker behind everything launched so far, at `time`; false on failure. */
bool marker_place(struct counted *counted, uint64_t time);
/* Places a marker behind unmarked launches if the stream has been quiet, or is not launched into any more (`over`). */
void marker_place_quiet(struct counted *counted, bool over);
/* Looks which markers have passed; false: none. */
bool marker_look(struct counted *counted);

/* Count launches of the stream as finished: all of them, or those behind the last marker. In any context. */
void marker_finish_all(struct counted *counted);
void marker_finish_unmarked(struct counted *counted);
/* Frees the spare markers. Their events are destroyed here, unless that happened with their context (`destroyed`; then
 * in any context). */
void marker_drop(struct counted *counted, bool destroyed);

void marker_forget(void);	/* in the child of fork() */

#endif
