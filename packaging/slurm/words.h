/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of Slurm: lists of generic resources, and AdminComment. No part of this knows of its libraries. */
#ifndef GGROUP_WORDS_H
#define GGROUP_WORDS_H

#include <stdbool.h>

/* Returns the number behind a name in a list of generic resources: `gpu:2(IDX:0-1),shard:a100:3(3/16)`. */
unsigned long gres_count(const char *list, const char *name);

/* Writes a comment in which the entry of a node has these figures, and all else is as it was. */
void comment_with(const char *old, const char *node, const char *figures, char *comment, unsigned long size);

/* Returns whether the entry of a node in a comment has these figures. */
bool comment_has(const char *comment, const char *node, const char *figures);

/* Returns whether a list of libraries, as LD_PRELOAD has it (ld.so(8)), names one. */
bool preload_has(const char *list, const char *library);

#endif
