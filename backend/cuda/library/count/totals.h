/* SPDX-License-Identifier: Apache-2.0 */
/* How many kernels were submitted and finished on each GPU, and the page that
 * shows it: shared with the daemon, which made it and only reads it. */
#ifndef GGROUP_CUDA_TOTALS_H
#define GGROUP_CUDA_TOTALS_H

#include "device.h"

/* The layout of the shared page: little endian, one cache line a GPU. Mirrored by
 * backend/cuda/page.py. */
struct totals_line {
	uint64_t submitted;
	uint64_t finished;
	uint64_t launches;	/* calls that submitted some: a graph may be thousands of kernels */
	uint64_t worked;	/* for how long some were pending (totals.c); 0 where that is not told */
	uint64_t reserved[4];
};

struct totals_page {
	struct totals_line gpu[GG_DEVICES];	/* by ggroupfs's index */
	uint64_t stands;			/* 1 between departure_begin and departure_end */
};

/* The page to count on from now on; NULL: none. What was counted before is carried over. */
void totals_share(struct totals_page *page);
/* Says on the page whether the program stands by to be moved; false: there is none. */
bool totals_stand(bool stands);

/* What a call submits is added at once. */
void totals_add(struct device *device, uint64_t submitted, uint64_t finished);
/* So many have finished, the last of them at about that moment; us. */
void totals_finish(struct device *device, uint64_t finished, uint64_t at);
void totals_get(const struct device *device, uint64_t *submitted, uint64_t *finished);
void totals_forget(void);	/* in the child of fork() */

#endif
