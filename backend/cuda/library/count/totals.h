/* SPDX-License-Identifier: Apache-2.0 */
/* How many kernels were submitted and finished on each GPU, what is told of its working set, and the page that
 * shows both: shared with the daemon, which made it and only reads it. */
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

/* The same of its working set. Behind all else: the lines above are as long as libraries have them that know nothing of it. */
struct totals_set_line {
	uint64_t used, resident, unwritten;	/* bytes: of the working set; of that on the GPU; not written since the host had them */
	uint64_t told;				/* enum totals_told */
	uint64_t missed, over;			/* bytes: used in the last turn and not expected to be; the other way round */
	uint64_t reserved[2];
};

/* Whether all of these hold, and memory of the GPU is shared with another process. */
enum totals_told { TOTALS_UNKNOWN, TOTALS_ALONE, TOTALS_SHARES };

struct totals_page {
	struct totals_line gpu[GG_DEVICES];	/* by ggroupfs's index */
	uint64_t stands;			/* 1 between departure_begin and departure_end */
	uint64_t reserved[7];
	struct totals_set_line set[GG_DEVICES];	/* by ggroupfs's index */
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

/* What is told of the working set of the last turn; bytes, as in the line. */
struct totals_set {
	uint64_t used, resident, unwritten, missed, over;
};

void totals_tell(struct device *device, const struct totals_set *set, enum totals_told told);
void totals_forget(void);	/* in the child of fork() */

#endif
