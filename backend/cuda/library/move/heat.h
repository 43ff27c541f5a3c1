/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which memory is hot: the memory that the pointers and tensor maps among a kernel's parameters refer to, and both ends
 * of every copy.
 *
 * Looking costs time. So it is done only while memory is in the host, or was lately (exchange.c), and while a working
 * set is learnt (workset.c); then it is done for every launch. The layout of a function's parameters
 * (cuFuncGetParamInfo, CUDA 12.4) is asked for once.
 */
#ifndef GGROUP_CUDA_HEAT_H
#define GGROUP_CUDA_HEAT_H

#include "device.h"

/* What heat is wanted for; it is tracked while there is any reason. */
enum heat_reason { HEAT_EXCHANGE, HEAT_WORKSET };

extern bool heat_wanted;	/* read without a lock on every launch; atomically */
static inline bool heat_is_wanted(void)
{
	return __atomic_load_n(&heat_wanted, __ATOMIC_RELAXED);
}

/* By one thread at a time, the listening thread. */
void heat_want(enum heat_reason reason, bool wanted);
bool heat_is_wanted_for(enum heat_reason reason);

void heat_launch(CUfunction function, void **parameters, void **extra);
void heat_touch(CUdeviceptr pointer, size_t bytes);

/* Calls `visit`, in the order of the parameters, for every word of a launch's parameters that may be a pointer, with 0
 * bytes, and for the memory that each tensor map describes. */
typedef void heat_visit(CUdeviceptr address, size_t bytes, void *argument);
void heat_words(CUfunction function, void **parameters, void **extra, heat_visit *visit, void *argument);
/* Counts a use of memory as `visit` is told of it. */
void heat_use(CUdeviceptr address, size_t bytes);

/* Functions are being unloaded. From heat_code_goes on nothing is known of any; after heat_code_gone their handles may
 * be other functions'. */
void heat_code_goes(void);
void heat_code_gone(void);

/* heat_kernels: these handles are of a library's kernels, not of functions. heat_library_gone: those of an unloaded
 * library are no longer. */
void heat_kernels(const CUkernel *handles, size_t count, CUlibrary library);
void heat_library_gone(CUlibrary library);

#endif
