/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of Slurm: lists of generic resources, and AdminComment. This part does not depend on Slurm's libraries. */
#ifndef GGROUP_WORDS_H
#define GGROUP_WORDS_H

#include <stdbool.h>

/* Returns the count of a name in a list of generic resources: `gpu:2(IDX:0-1),shard:a100:3(3/16)`. */
unsigned long gres_count(const char *list, const char *name);

/* Writes the old comment with these figures in the entry of a node; all other entries stay. */
void comment_with(const char *old, const char *node, const char *figures, char *comment, unsigned long size);

/* Returns whether the entry of a node in a comment has these figures. */
bool comment_has(const char *comment, const char *node, const char *figures);

/* Returns whether a list of libraries, in the syntax of LD_PRELOAD (ld.so(8)), contains one. */
bool preload_has(const char *list, const char *library);

#endif
