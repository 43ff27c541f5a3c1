/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The events that tell what a stream has finished.
 *
 * For each stream there is a number of launches behind which no marker has been placed yet, and a
 * queue of markers, each an event with the number of kernels before it.
 */
#ifndef GGROUP_CUDA_MARKER_H
#define GGROUP_CUDA_MARKER_H

#include "device.h"
#include "stream.h"

struct marker;

/* A stream in which something was launched. */
struct counted {
	struct counted *next;		/* of all (counters.c); never freed, used again */
	pthread_mutex_t lock;		/* for the rest */
	bool live;			/* stands for `key` */
	bool gone;			/* the stream was destroyed: only its markers are left */
	bool held;			/* the context may be about to go */
	bool captured;
	struct stream_key key;
	CUcontext context;
	struct device *device;
	uint64_t kernels, launches;	/* behind the last marker */
	uint64_t last, marked;		/* when something was launched, and a marker placed; us */
	int failures;
	struct marker *first, *newest;	/* in the order in which they pass */
	struct marker *spare;
};

/* All with the stream's lock held, in a current context that is the stream's, unless
 * they say otherwise. */

/* `kernels` were launched there, by this thread. */
void marker_launched(struct counted *counted, uint64_t kernels);
/* Places one behind everything launched so far, at `time`; false: it cannot be. */
bool marker_place(struct counted *counted, uint64_t time);
/* Where the stream has been quiet, or nothing is launched there any more (`over`), what is unmarked gets its marker
 * now. */
void marker_place_quiet(struct counted *counted, bool over);
/* Which markers have passed; false: none. */
bool marker_look(struct counted *counted);

/* What was launched there counts as finished: all, or what is behind the last
 * marker. In any context. */
void marker_finish_all(struct counted *counted);
void marker_finish_unmarked(struct counted *counted);
/* Those that wait for nothing: their events go with the context (`destroyed`, in
 * any), or are given back. */
void marker_drop(struct counted *counted, bool destroyed);

void marker_forget(void);	/* in the child of fork() */

#endif
