/* SPDX-License-Identifier: Apache-2.0 */
/* What the line of plugstack.conf says behind the name of the plugin. No part of this knows of Slurm. */
#ifndef GGROUP_CONFIG_H
#define GGROUP_CONFIG_H

#include "values.h"

#define RULES 64
#define PARTITION 64
#define REASON 256
/* Bytes of a path, as of PATH_MAX. */
#define PLACE 4096

enum relation { DEFAULT, AT_MOST, AT_LEAST };

struct rule {
	char partition[PARTITION];	/* empty: all */
	const struct row *row;
	enum relation relation;
	struct value value;
	const char *text;	/* as it stands there */
};

struct config {
	const char *tree, *library;
	bool runs_without;	/* a job on a node whose daemon is gone */
	bool records;		/* in the job's AdminComment */
	unsigned long shards;	/* of one GPU; 0: slurmctld knows */
	struct rule rules[RULES];
	unsigned int rule_count;
	char fault[REASON];	/* what cannot be understood; empty: nothing */
};

void config_read(struct config *config, int count, char **words);

/* Sets what a job of the partition has for an option that it does not give. */
bool config_default(const struct config *config, const char *partition, const struct row *row, struct value *value);

/* Writes the reason why a job may not have that value, and returns true; false where it may. The partition is NULL and
 * the GPU's memory 0 where a job is submitted: then what cannot be known yet is let pass. */
bool config_refuses(const struct config *config, const char *partition, const struct row *row, struct value value,
		    uint64_t capacity, char reason[static REASON]);

#endif
