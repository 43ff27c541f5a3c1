/* SPDX-License-Identifier: Apache-2.0 */
/* The arguments of the plugin in plugstack.conf. This part does not depend on Slurm. */
#ifndef GGROUP_CONFIG_H
#define GGROUP_CONFIG_H

#include "values.h"

#define RULES 64
#define PARTITION 64
#define REASON 256
/* Size of a buffer for a path, bytes, as PATH_MAX. */
#define PLACE 4096

enum relation { DEFAULT, AT_MOST, AT_LEAST };

struct rule {
	char partition[PARTITION];	/* empty: all */
	const struct row *row;
	enum relation relation;
	struct value value;
	const char *text;	/* as written in the file */
};

struct config {
	const char *tree, *library;
	bool runs_without;	/* on a node whose daemon is gone */
	bool records;		/* in the job's AdminComment */
	unsigned long shards;	/* of one GPU; 0: ask slurmctld */
	struct rule rules[RULES];
	unsigned int rule_count;
	char fault[REASON];	/* the first invalid argument; empty: none */
};

void config_read(struct config *config, int count, char **words);

/* Sets the default value of an option for a job of the partition, and returns whether there is one. */
bool config_default(const struct config *config, const char *partition, const struct row *row, struct value *value);

/* Returns true, with the reason, if a job may not have that value, and false if it may. At submission the partition is
 * NULL and the GPU's memory 0; what cannot be decided without them is let pass. */
bool config_refuses(const struct config *config, const char *partition, const struct row *row, struct value value,
		    uint64_t capacity, char reason[static REASON]);

#endif
