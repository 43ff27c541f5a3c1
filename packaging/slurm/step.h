/* SPDX-License-Identifier: Apache-2.0 */
/* The step that a slurmstepd is about to start: the slices of its cgroups, and their settings. */
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
	char place[PLACE], step_place[PLACE];	/* slices of the job and of the step */
	uint32_t job, step;
	bool is_followed;	/* the job has a slice */
	uint32_t ended;		/* tasks */
} here;

/* Records why the tasks must not run. The first reason is kept. */
void step_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

bool step_asks(void);

/* Finds the cgroups of the job and the step, and returns whether they were found. */
bool step_find(void);

/* Returns whether the options of this step apply to its job: those of the script do, and those of the first step if
 * there is no script on this node. `fd` is the job's cgroup. */
bool step_speaks(int fd);

/* Opens the directory of a cgroup. Returns -1 with errno on failure. */
int cgroup_open(const char *cgroup);

/* Returns whether the job has settings that only a daemon could enforce. */
bool step_is_concerned(void);

/* Makes the slices, and applies the settings. */
void step_prepare(void);

#endif
