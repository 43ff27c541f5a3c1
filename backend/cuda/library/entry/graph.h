/* SPDX-License-Identifier: Apache-2.0 */
/* Executable graphs, whose kernels are counted when they are launched. */
#ifndef GGROUP_CUDA_GRAPH_H
#define GGROUP_CUDA_GRAPH_H

void graph_forget(void);	/* in the child of fork() */

#endif
