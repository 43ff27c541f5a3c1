/* SPDX-License-Identifier: Apache-2.0 */
/* The mounted tree of a node: slices of cgroups, and their control files. */
#ifndef GGROUP_TREE_H
#define GGROUP_TREE_H

#include <stdbool.h>
#include <stdint.h>

#include "config.h"

#define GPUS 64

struct tree {
	const char *mount;
	char socket[PLACE];	/* of the daemon; empty: none is named */
	bool nvidia;		/* the GPUs are NVIDIA's, so memory moves by the library */
	unsigned int gpus[GPUS], gpu_count;
	uint64_t capacities[GPUS];
};

struct figures {
	uint64_t gpu_us, peak;	/* over all GPUs; of the peaks the largest one */
};

/* Cgroups of a step, as /proc/self/cgroup of its slurmstepd has them. */
struct cgroups {
	char job[PLACE], step[PLACE];
	char node[PLACE];	/* name of the node where the scope has it; else empty */
};

/* Returns NULL, or why there is no tree whose daemon answers. */
const char *tree_open(struct tree *tree, const char *mount);

/* Returns NULL, or the reason. `lines` is what is in /proc/self/cgroup. */
const char *cgroups_find(const char *lines, uint32_t job, struct cgroups *found);

/* Returns where the slice of a cgroup is. */
bool tree_slice(const struct tree *tree, const char *cgroup, char place[static PLACE]);

/* Makes a slice, and those above it. Returns 1 where it was made, 0 where it was there, -1 with errno. */
int tree_make(const struct tree *tree, const char *place);

/* Writes into a control file of one GPU. Returns 0, or -1 with errno. */
int tree_write(const char *place, unsigned int gpu, const char *control, const char *text);

/* Returns whether a slice has a limit of memory, or protection of it, on any GPU. */
bool tree_moves_memory(const struct tree *tree, const char *place);

/* Returns false where nothing could be read. */
bool tree_figures(const struct tree *tree, const char *place, struct figures *figures);

/* Reads a small file, and ends it with a NUL. Returns its length, or -1 with errno. */
long file_read(const char *path, char *text, unsigned long size);

#endif
