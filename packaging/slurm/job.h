/* SPDX-License-Identifier: Apache-2.0 */
/* What slurmctld knows of a job, and the record that it keeps of it. */
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

/* Reads what was allocated to a job on a node, whose name may be empty: that of this host, then. Returns NULL, or the
 * reason. */
const char *job_read(uint32_t id, const char *node, struct job *job);

/* Returns the shards of one GPU of a node, or 0 where that is not known. */
unsigned long job_shards_of_gpu(const char *node);

/* Puts the figures of a node into the job's AdminComment, beside what else stands there. Returns NULL, or the reason. */
const char *job_record(uint32_t id, const char *node, const char *figures);

#endif
