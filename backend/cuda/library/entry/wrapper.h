/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of every wrapper. For the files of entry/ alone: nothing below them calls a wrapper. */
#ifndef GGROUP_CUDA_WRAPPER_H
#define GGROUP_CUDA_WRAPPER_H

#include <string.h>

#include "driver.h"
#include "library.h"
#include "ours.h"

/* The visibility of a wrapper; the rest of the library is hidden (-fvisibility=hidden). */
#define WRAPPER __attribute__((visibility("default"))) CUresult

/*
 * The first line of every wrapper: gets the library ready, and passes on calls that the library has no part in, which
 * it made itself, or libcuda within one of those. A program that links to an entry point that its driver lacks would
 * not have started without the library; here it gets the error.
 */
#define PASS_INSIDE(name, args)					\
	do {							\
		library_begin();					\
		if (!real.name)					\
			return CUDA_ERROR_NOT_SUPPORTED;	\
		if (ours_inside())				\
			return real.name args;			\
	} while (0)

/* Whether stream 0 of an entry point is the thread's own, as its name tells: ..._ptsz, ..._ptds. */
#define PER_THREAD(name) (!strncmp(#name + sizeof(#name) - sizeof("_ptsz"), "_pt", 3))

/* A wrapper that does `then` where the driver succeeded. */
#define FORWARD_THEN(name, parameters, arguments, then)	\
	WRAPPER name parameters				\
	{						\
		CUresult result;			\
							\
		PASS_INSIDE(name, arguments);		\
		CALL_REAL(result, name, arguments);	\
		if (result == CUDA_SUCCESS) {		\
			then;				\
		}					\
		return result;				\
	}

/* A wrapper that does nothing else. */
#define FORWARD(name, parameters, arguments) FORWARD_THEN(name, parameters, arguments, )

#endif
