// SPDX-License-Identifier: Apache-2.0
/* Modules, functions and launches of the double. */

#include "internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_PARAMETERS 32

struct CUmod_st { enum fake_kind kind; };
struct CUlib_st { enum fake_kind kind; };

struct CUfunc_st {
	enum fake_kind kind;		/* FAKE_FUNCTION, or FAKE_KERNEL for a CUkernel */
	CUcontext context;		/* NULL for a CUkernel */
	void (*code)(void **);
	const size_t *sizes;		/* ends with 0; NULL: no parameters */
	struct CUfunc_st *function;	/* of a CUkernel: its CUfunction */
};

/* A launch in a queue, with copies of its parameters. */
struct launch {
	void (*code)(void **);
	unsigned int rows;
	size_t count;
	void *parameters[MOST_PARAMETERS];
	char data[];
};

static struct CUfunc_st *find(const char *name, enum fake_kind kind)
{
	struct CUfunc_st *function;
	char sizes[256];
	void *code = dlsym(RTLD_DEFAULT, name);

	if (!code)
		return NULL;
	function = fake_object(sizeof(*function), kind);
	*(void **)&function->code = code;
	snprintf(sizes, sizeof(sizes), "%s_parameters", name);
	function->sizes = dlsym(RTLD_DEFAULT, sizes);
	return function;
}

/* Each parameter is aligned to its size, up to 16, as in the ABI of the GPU. */
static CUresult parameter(const struct CUfunc_st *function, size_t index, size_t *offset, size_t *size)
{
	size_t end = 0;

	for (size_t i = 0; function->sizes && function->sizes[i]; i++) {
		size_t bytes = function->sizes[i];
		/* 64: a tensor map. */
		size_t aligned = bytes % 64 == 0 ? 64 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 1;

		end = (end + aligned - 1) / aligned * aligned;
		if (i == index) {
			*offset = end;
			*size = bytes;
			return CUDA_SUCCESS;
		}
		end += bytes;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

/* Second dimension of the grid, for the kernel that runs in this thread. */
static __thread unsigned int rows;

__attribute__((visibility("default"))) unsigned int fake_launch_rows(void)
{
	return rows;
}

static void run(void *argument)
{
	static uint64_t microseconds = UINT64_MAX;
	uint64_t least = __atomic_load_n(&microseconds, __ATOMIC_RELAXED);
	struct launch *launch = argument;

	if (least == UINT64_MAX) {
		least = fake_number("FAKE_KERNEL_US", 0);
		__atomic_store_n(&microseconds, least, __ATOMIC_RELAXED);
	}
	rows = launch->rows;
	launch->code(launch->parameters);
	if (least) {
		struct timespec time = { (time_t)(least / 1000000), (long)(least % 1000000 * 1000) };

		nanosleep(&time, NULL);
	}
}

static const char *in_buffer(void **extra, size_t *bytes)
{
	const char *buffer = NULL;

	*bytes = 0;
	for (size_t i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
		if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
			buffer = extra[i + 1];
		else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE)
			*bytes = *(size_t *)extra[i + 1];
		else
			fake_die("a launch with a bad `extra`");
	}
	return buffer;
}

struct job *fake_launch_job(CUfunction function, void **parameters, void **extra, CUresult *error)
{
	size_t offset, size, total = 0, buffer_bytes = 0;
	const char *buffer = NULL;
	struct launch *launch;

	if (!function || (function->kind != FAKE_FUNCTION && function->kind != FAKE_KERNEL)) {
		if (function && function->kind == FAKE_DEAD)
			fake_die("a launch of a function that was unloaded");
		*error = CUDA_ERROR_INVALID_HANDLE;
		return NULL;
	}
	if (parameters && extra) {
		*error = CUDA_ERROR_INVALID_VALUE;
		return NULL;
	}
	for (size_t i = 0; !parameter(function, i, &offset, &size); i++)
		total = offset + size;
	if (extra)
		buffer = in_buffer(extra, &buffer_bytes);
	if (total && !parameters && (!buffer || buffer_bytes < total)) {
		*error = CUDA_ERROR_INVALID_VALUE;
		return NULL;
	}
	launch = calloc(1, sizeof(*launch) + total + 16);
	if (!launch)
		fake_die("out of memory");
	launch->code = function->code;
	launch->rows = 1;
	for (size_t i = 0; !parameter(function, i, &offset, &size); i++) {
		launch->parameters[i] = launch->data + offset;
		memcpy(launch->data + offset, parameters ? parameters[i] : buffer + offset, size);
		launch->count++;
	}
	return fake_job(run, launch, free);
}

void **fake_launch_parameters(struct job *job)
{
	return ((struct launch *)job->argument)->parameters;
}

/* A launch that all SMs of its stream have to hold at once; 0 blocks: any. */
static CUresult launch_at_once(CUfunction function, unsigned int grid_y, void **parameters, void **extra,
			       CUstream handle, bool per_thread, uint64_t blocks)
{
	CUDA_KERNEL_NODE_PARAMS node = { .func = function };
	CUresult result = CUDA_SUCCESS;
	struct fake_stream *stream;
	struct job *job;

	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	stream = fake_stream(handle, per_thread);
	if (blocks > fake_sms(stream->context->groups))
		return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
	job = fake_launch_job(function, parameters, extra, &result);
	if (!job)
		return result;
	((struct launch *)job->argument)->rows = grid_y;
	fake_room(stream);
	if (fake_family(stream->context) != fake_family(fake_context()))
		result = CUDA_ERROR_INVALID_HANDLE;
	else
		result = fake_enqueue_job(stream, CU_GRAPH_NODE_TYPE_KERNEL, job, &node);
	fake_job_put(job);
	return result;
}

static CUresult launch(CUfunction function, unsigned int grid_y, void **parameters, void **extra, CUstream handle,
		       bool per_thread)
{
	return launch_at_once(function, grid_y, parameters, extra, handle, per_thread, 0);
}

#define GEOMETRY unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz
#define CHECK_GEOMETRY								\
	do {									\
		if (!gx || !gy || !gz || !bx || !by || !bz)			\
			return CUDA_ERROR_INVALID_VALUE;			\
	} while (0)

#define LAUNCH(name, per_thread)							\
	FAKE_EXPORT name(CUfunction f, GEOMETRY, unsigned int shared, CUstream stream,	\
			 void **parameters, void **extra)				\
	{										\
		FAKE(name);								\
		(void)shared;								\
		CHECK_GEOMETRY;								\
		return launch(f, gy, parameters, extra, stream, per_thread);		\
	}
LAUNCH(cuLaunchKernel, false)
LAUNCH(cuLaunchKernel_ptsz, true)

#define LAUNCH_COOPERATIVE(name, per_thread)						\
	FAKE_EXPORT name(CUfunction f, GEOMETRY, unsigned int shared, CUstream stream,	\
			 void **parameters)						\
	{										\
		FAKE(name);								\
		(void)shared;								\
		CHECK_GEOMETRY;								\
		return launch_at_once(f, gy, parameters, NULL, stream, per_thread, (uint64_t)gx * gy * gz);	\
	}
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, false)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

#define LAUNCH_EX(name, per_thread)								\
	FAKE_EXPORT name(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra)	\
	{											\
		struct fake_stream *stream;							\
		uint64_t blocks = 0;								\
												\
		FAKE(name);									\
		if (!fake_context())								\
			return CUDA_ERROR_INVALID_CONTEXT;					\
		stream = fake_stream(config->hStream, per_thread);				\
		for (unsigned int i = 0; i < config->numAttrs; i++)				\
			if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)		\
				blocks = (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ;	\
			else if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION &&	\
				 stream->context->groups && config->attrs[i].value.clusterDim.x > 8)	\
				fake_die("a launch of clusters that fit in no group");		\
		return launch_at_once(f, config->gridDimY, parameters, extra, config->hStream,	\
				      per_thread, blocks);					\
	}
LAUNCH_EX(cuLaunchKernelEx, false)
LAUNCH_EX(cuLaunchKernelEx_ptsz, true)

FAKE_EXPORT cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags)
{
	CUresult result = CUDA_SUCCESS;

	FAKE(cuLaunchCooperativeKernelMultiDevice);
	(void)flags;
	for (unsigned int i = 0; i < count && !result; i++) {
		struct fake_stream *stream = (struct fake_stream *)list[i].hStream;
		struct job *job;

		/* The documentation allows neither the legacy stream nor a thread's own. */
		fake_check(stream, FAKE_STREAM, "cuLaunchCooperativeKernelMultiDevice");
		job = fake_launch_job(list[i].function, list[i].kernelParams, NULL, &result);
		if (job)
			result = fake_enqueue_job(stream, CU_GRAPH_NODE_TYPE_KERNEL, job, NULL);
		fake_job_put(job);
	}
	return result;
}

FAKE_EXPORT cuLaunch(CUfunction f)
{
	FAKE(cuLaunch);
	return launch(f, 1, NULL, NULL, NULL, false);
}

FAKE_EXPORT cuLaunchGrid(CUfunction f, int width, int height)
{
	FAKE(cuLaunchGrid);
	(void)width;
	(void)height;
	return launch(f, 1, NULL, NULL, NULL, false);
}

FAKE_EXPORT cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream)
{
	FAKE(cuLaunchGridAsync);
	(void)width;
	(void)height;
	return launch(f, 1, NULL, NULL, stream, false);
}

struct host { CUhostFn function; void *data; };

static void run_host(void *argument)
{
	struct host *host = argument;

	host->function(host->data);
}

FAKE_EXPORT cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
	struct host *host;

	FAKE(cuLaunchHostFunc);
	host = malloc(sizeof(*host));
	if (!host)
		fake_die("out of memory");
	*host = (struct host){ function, data };
	return fake_enqueue(fake_stream(stream, false), CU_GRAPH_NODE_TYPE_HOST, run_host, host, free);
}

FAKE_EXPORT cuModuleLoadData(CUmodule *module, const void *image)
{
	FAKE(cuModuleLoadData);
	(void)image;
	if (!fake_context())
		return CUDA_ERROR_INVALID_CONTEXT;
	*module = fake_object(sizeof(**module), FAKE_MODULE);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	FAKE(cuModuleGetFunction);
	fake_check(module, FAKE_MODULE, "cuModuleGetFunction");
	*function = find(name, FAKE_FUNCTION);
	if (!*function)
		return CUDA_ERROR_NOT_FOUND;
	(*function)->context = fake_context();
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values,
			      unsigned int jits, CUlibraryOption *options, void **values, unsigned int count)
{
	FAKE(cuLibraryLoadData);
	(void)code, (void)jit, (void)jit_values, (void)jits, (void)options, (void)values, (void)count;
	*library = fake_object(sizeof(**library), FAKE_LIBRARY);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
	FAKE(cuLibraryGetKernel);
	fake_check(library, FAKE_LIBRARY, "cuLibraryGetKernel");
	*kernel = (CUkernel)find(name, FAKE_KERNEL);
	return *kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

FAKE_EXPORT cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
	struct CUfunc_st *self = (struct CUfunc_st *)kernel;

	FAKE(cuKernelGetFunction);
	if (!self || self->kind != FAKE_KERNEL)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!self->function) {
		self->function = fake_object(sizeof(*self), FAKE_FUNCTION);
		self->function->code = self->code;
		self->function->sizes = self->sizes;
	}
	*function = self->function;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size)
{
	FAKE(cuFuncGetParamInfo);
	if (!function || function->kind != FAKE_FUNCTION)
		return CUDA_ERROR_INVALID_HANDLE;
	return parameter(function, index, offset, size);
}

FAKE_EXPORT cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
	struct CUfunc_st *self = (struct CUfunc_st *)kernel;

	FAKE(cuKernelGetParamInfo);
	if (!self || self->kind != FAKE_KERNEL)
		return CUDA_ERROR_INVALID_HANDLE;
	return parameter(self, index, offset, size);
}
