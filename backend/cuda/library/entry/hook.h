/* SPDX-License-Identifier: Apache-2.0 */
/* The ways to what is caught: what of ours stands for what. */
#ifndef GGROUP_CUDA_HOOK_H
#define GGROUP_CUDA_HOOK_H

/* What a program is to find under a name; NULL: what libc finds. */
void *hook_instead(const char *name);
/* Ours for an address of libc, of libcuda or NVML; NULL: none. Nothing is looked for by that. */
void *hook_behind(const void *pointer);

void hook_forget(void);	/* in the child of fork(): only its lock */

#endif
