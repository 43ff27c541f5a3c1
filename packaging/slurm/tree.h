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
	char socket[PLACE];	/* of the daemon; empty: unknown */
	bool nvidia;		/* whether the GPUs are NVIDIA's, so that the library moves memory */
	unsigned int gpus[GPUS], gpu_count;
	uint64_t capacities[GPUS];
};

struct figures {
	uint64_t gpu_us, peak;	/* time over all GPUs; largest peak of any GPU */
};

/* Cgroups of a step, from /proc/self/cgroup of its slurmstepd. */
struct cgroups {
	char job[PLACE], step[PLACE];
	char node[PLACE];	/* name of the node, if it is in the scope's name; else empty */
};

/* Returns NULL, or the reason why there is no tree with a daemon that answers. */
const char *tree_open(struct tree *tree, const char *mount);

/* Finds the cgroups of a job's step in `lines`, the content of /proc/self/cgroup. Returns NULL, or the reason for a
 * failure. */
const char *cgroups_find(const char *lines, uint32_t job, struct cgroups *found);

/* Sets `place` to the path of a cgroup's slice, and returns whether it fits. */
bool tree_slice(const struct tree *tree, const char *cgroup, char place[static PLACE]);

/* Makes a slice, and those above it. Returns 1 if it was made, 0 if it existed, -1 with errno on failure. */
int tree_make(const struct tree *tree, const char *place);

/* Writes a value to a control file of one GPU. Returns 0, or -1 with errno. */
int tree_write(const char *place, unsigned int gpu, const char *control, const char *text);

/* Returns whether a slice has a limit or a protection of memory on any GPU. */
bool tree_moves_memory(const struct tree *tree, const char *place);

/* Reads the figures of a slice, and returns false if none could be read. */
bool tree_figures(const struct tree *tree, const char *place, struct figures *figures);

/* Reads a small file, and terminates it with a NUL. Returns its length, or -1 with errno. */
long file_read(const char *path, char *text, unsigned long size);

#endif
