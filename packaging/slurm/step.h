/* SPDX-License-Identifier: Apache-2.0 */
/* The step that a slurmstepd is about to start: the slices of its cgroups, and what is written there. */
#ifndef GGROUP_STEP_H
#define GGROUP_STEP_H

#include "config.h"
#include "tree.h"

#define FAILURE 1024

extern struct step {
	struct config config;
	struct value asked[ROWS];	/* by options */
	char failure[FAILURE];		/* why its tasks must not run; empty: they may */
	struct tree tree;
	struct cgroups cgroups;
	char place[PLACE], step_place[PLACE];	/* slices of the job, and of the step */
	uint32_t job, step;
	bool is_followed;	/* the job has a slice */
	uint32_t ended;		/* tasks */
} here;

/* Notes why the tasks must not run. The first reason stays. */
void step_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

bool step_asks(void);

/* Finds the cgroups. */
bool step_find(void);

/* Returns whether what this step asks for is for its job: so for the script, and for the first step where there is none
 * on this node. `fd` is the job's cgroup. */
bool step_speaks(int fd);

/* Opens the directory of a cgroup; -1 with errno. */
int cgroup_open(const char *cgroup);

/* Returns whether the job has something that only a daemon could hold. */
bool step_is_concerned(void);

/* Makes the slices, and has them hold what is asked for. */
void step_prepare(void);

#endif
