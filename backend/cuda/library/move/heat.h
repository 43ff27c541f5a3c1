/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which memory is hot: the pointers and tensor maps among a kernel's parameters, and the two ends of every copy.
 *
 * Looking costs time, so it is done only while memory is in the host, or was of late (exchange.c), and while a working
 * set is learnt (workset.c), and then for every launch; the layout of a function's parameters (cuFuncGetParamInfo, CUDA 12.4) is asked for once.
 */
#ifndef GGROUP_CUDA_HEAT_H
#define GGROUP_CUDA_HEAT_H

#include "device.h"

/* What wants to know: for as long as any of it does. */
enum heat_reason { HEAT_EXCHANGE, HEAT_WORKSET };

extern bool heat_wanted;	/* read without a lock on every launch; atomically */
static inline bool heat_is_wanted(void)
{
	return __atomic_load_n(&heat_wanted, __ATOMIC_RELAXED);
}

/* By one thread at a time, the listening one. */
void heat_want(enum heat_reason reason, bool wanted);
bool heat_is_wanted_for(enum heat_reason reason);

void heat_launch(CUfunction function, void **parameters, void **extra);
void heat_touch(CUdeviceptr pointer, size_t bytes);

/* Calls `visit` for every word among the parameters of a launch that may be a pointer, with 0 bytes, and for what every
 * tensor map describes; in the order of the parameters. */
typedef void heat_visit(CUdeviceptr address, size_t bytes, void *argument);
void heat_words(CUfunction function, void **parameters, void **extra, heat_visit *visit, void *argument);
/* What that tells of is used. */
void heat_use(CUdeviceptr address, size_t bytes);

/* Functions are being unloaded: from the first on nothing is known of any, after the second their handles
 * may mean others. */
void heat_code_goes(void);
void heat_code_gone(void);

/* Those handles are of kernels of a library, not of functions; and those of a library that was unloaded are not. */
void heat_kernels(const CUkernel *handles, size_t count, CUlibrary library);
void heat_library_gone(CUlibrary library);

#endif
