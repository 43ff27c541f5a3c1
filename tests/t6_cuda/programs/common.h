/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the tests' programs. */
#ifndef COMMON_H
#define COMMON_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* End the program unless the call answers `wanted`. */
#define EXPECT(wanted, call)									\
	do {											\
		int result_ = (int)(call);							\
		if (result_ != (int)(wanted)) {							\
			fprintf(stderr, "%s:%d: %s answers %d, not %d\n", __FILE__, __LINE__, #call, result_,	\
				(int)(wanted));							\
			exit(1);								\
		}										\
	} while (0)
#define DO(call) EXPECT(CUDA_SUCCESS, call)
#define CHECK(condition)									\
	do {											\
		if (!(condition)) {								\
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);	\
			exit(1);								\
		}										\
	} while (0)

/* Define a kernel: the function that the double calls, and the description of its parameters. */
#define KERNEL(name, ...)				\
	const size_t name##_parameters[] = { __VA_ARGS__, 0 };	\
	void name(void **parameters)

static inline CUcontext start(int device)
{
	CUcontext context;

	DO(cuInit(0));
	DO(cuDevicePrimaryCtxRetain(&context, device));
	DO(cuCtxSetCurrent(context));
	return context;
}

static inline CUfunction function(const char *name)
{
	CUmodule module;
	CUfunction found;

	DO(cuModuleLoadData(&module, "image"));
	DO(cuModuleGetFunction(&found, module, name));
	return found;
}

static inline uint64_t microseconds(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

/* Copy 0, 1, 2 ... to an address; `data` has room for them. */
static inline void number(CUdeviceptr address, uint64_t *data, size_t bytes)
{
	for (size_t i = 0; i < bytes / 8; i++)
		data[i] = i;
	DO(cuMemcpyHtoD_v2(address, data, bytes));
}

/* Print something for the test, and wait for its answer. */
static inline void tell(const char *what, uint64_t number)
{
	char line[64];

	printf("%s %llu\n", what, (unsigned long long)number);
	fflush(stdout);
	CHECK(fgets(line, sizeof(line), stdin));
}

#endif
