/* SPDX-License-Identifier: Apache-2.0 */
/* How many kernels were submitted and finished on each GPU, what is known of its working set, and the page that shows
 * both. The daemon makes the page, shares it with the program and only reads it. */
#ifndef GGROUP_CUDA_TOTALS_H
#define GGROUP_CUDA_TOTALS_H

#include "device.h"

/* A line of the shared page: little endian, one cache line per GPU. Mirrored by backend/cuda/page.py. */
struct totals_line {
	uint64_t submitted;
	uint64_t finished;
	uint64_t launches;	/* calls that submitted kernels; one graph launch may submit thousands */
	uint64_t worked;	/* time for which kernels were pending (totals.c); 0: not told */
	uint64_t placed;	/* launches that ran on the SMs of a limit */
	uint64_t unplaced;	/* launches that ran on all SMs though there was one */
	uint64_t reserved[2];
};

/* A GPU's line for its working set. These lines come last, so that the lines above keep the layout of older
 * libraries. */
struct totals_set_line {
	uint64_t used, resident, unwritten;	/* bytes: all; on the GPU; not written since the host had them */
	uint64_t told;				/* enum totals_told */
	uint64_t missed, over;			/* bytes: used but not expected; expected but not used */
	uint64_t reserved[2];
};

/* Whether the figures of the working set are valid, and whether the GPU's memory is shared with another process. */
enum totals_told { TOTALS_UNKNOWN, TOTALS_ALONE, TOTALS_SHARES };

struct totals_page {
	struct totals_line gpu[GG_DEVICES];	/* by ggroupfs's index */
	uint64_t stands;			/* 1 between departure_begin and departure_end */
	uint64_t reserved[7];
	struct totals_set_line set[GG_DEVICES];	/* by ggroupfs's index */
};

/* Sets the page to count on from now on; NULL: none. Earlier counts are carried over. */
void totals_share(struct totals_page *page);
/* Says on the page whether the program stands by to be moved; false: there is no page. */
bool totals_stand(bool stands);

/* Adds what a call submits, and what has finished, as of now. */
void totals_add(struct device *device, uint64_t submitted, uint64_t finished);
/* Counts kernels as finished, the last of them at about `at`; us. */
void totals_finish(struct device *device, uint64_t finished, uint64_t at);
void totals_get(const struct device *device, uint64_t *submitted, uint64_t *finished);

/* Adds launches on the GPU of this number that ran on the SMs of a limit, and such that did not. */
void totals_placed(CUdevice ordinal, uint64_t placed, uint64_t unplaced);

/* Figures of the working set in the last turn; bytes, as in struct totals_set_line. */
struct totals_set {
	uint64_t used, resident, unwritten, missed, over;
};

void totals_tell(struct device *device, const struct totals_set *set, enum totals_told told);
void totals_forget(void);	/* in the child of fork() */

#endif
