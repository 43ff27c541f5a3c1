/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects that are loaded with RTLD_DEEPBIND: what they take from others is looked for in what they were loaded with
 * before it is in us. So what that found is put right afterwards, object by object: only the ways to what is
 * caught, so that all else is as the program wants it.
 */
#ifndef GGROUP_CUDA_BIND_H
#define GGROUP_CUDA_BIND_H

/* dlopen(3) with RTLD_DEEPBIND. */
void *bind_open(const char *file, int flags);

#endif
