/* SPDX-License-Identifier: Apache-2.0 */
/* slurmctld's information about a job, and its record of the job. */
#ifndef GGROUP_JOB_H
#define GGROUP_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "config.h"

struct job {
	char partition[PARTITION];
	bool has_gpu;		/* a GPU, or shards of one, on this node */
	unsigned long shards;	/* on this node */
};

/* Reads the allocation of a job on a node; an empty name means this host. Returns NULL, or the reason for a failure. */
const char *job_read(uint32_t id, const char *node, struct job *job);

/* Returns the number of shards of one GPU of a node, or 0 if it is unknown. */
unsigned long job_shards_of_gpu(const char *node);

/* Puts the figures of a node into the job's AdminComment, next to its other entries. Returns NULL, or the reason for a
 * failure. */
const char *job_record(uint32_t id, const char *node, const char *figures);

#endif
