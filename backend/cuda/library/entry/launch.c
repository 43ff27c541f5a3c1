// SPDX-License-Identifier: Apache-2.0
/*
 * Launches: they go through the gates, and are counted where they run rather than being captured. Graphs are in
 * graph.c. Work that has its place in a stream behind launches, such as events, only goes through the gates.
 */

#include <stdlib.h>

#include "burst.h"
#include "counters.h"
#include "detour.h"
#include "driver.h"
#include "gate.h"
#include "heat.h"
#include "ours.h"
#include "stream.h"
#include "turn.h"
#include "wrapper.h"

/* Before the gate: the first use of a device waits for the daemon. */
static struct device *enter(CUstream stream, bool per_thread)
{
	struct device *device = device_current();

	turn_enter(TURN_KERNELS, stream, per_thread);
	return device;
}

/* What a kernel needs of the SMs at once: all its blocks, or whole clusters of them. */
struct need {
	CUfunction function;
	uint64_t blocks;		/* of a cooperative launch; 0: it is none */
	int threads;			/* of a block */
	size_t shared;
	const CUlaunchConfig *clusters;	/* NULL: it has none that it names */
};

/* Return whether a kernel fits on so many SMs. One that does not would be refused there, or wait for itself for
 * ever. */
static bool fits(unsigned int sms, CUstream stream, void *argument)
{
	const struct need *need = argument;
	CUlaunchConfig there;
	int most = 0;

	if (need->blocks &&
	    (!real.cuOccupancyMaxActiveBlocksPerMultiprocessor ||
	     real.cuOccupancyMaxActiveBlocksPerMultiprocessor(&most, need->function, need->threads, need->shared) ||
	     need->blocks > (uint64_t)most * sms))
		return false;
	if (!need->clusters)
		return true;
	there = *need->clusters;
	there.hStream = stream;
	return real.cuOccupancyMaxActiveClusters &&
	       !real.cuOccupancyMaxActiveClusters(&most, need->function, &there) && most > 0;
}

static struct need need_of(CUfunction function, const CUlaunchConfig *config)
{
	struct need need = { .function = function };

	for (unsigned int i = 0; config && config->attrs && i < config->numAttrs; i++) {
		const CUlaunchAttribute *one = &config->attrs[i];

		if (one->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && one->value.cooperative)
			need.blocks = (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ;
		else if (one->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
			need.clusters = config;
	}
	if (config) {
		need.threads = (int)(config->blockDimX * config->blockDimY * config->blockDimZ);
		need.shared = config->sharedMemBytes;
	}
	return need;
}

/* Make a wrapper. `place` gives the call `detour.stream` in the place of the program's, and `back` takes that back;
 * `needs` is a struct need. */
#define LAUNCH(name, parameters, arguments, function, stream, per_thread, values, extra_values,	\
	       needs, place, back)								\
	WRAPPER name parameters									\
	{											\
		struct detour detour;								\
		struct device *device;								\
		CUresult result;								\
		bool runs, done = false;							\
												\
		PASS_INSIDE(name, arguments);							\
		device = enter(stream, per_thread);						\
		runs = stream_runs(stream, per_thread);						\
		if (runs && heat_is_wanted())							\
			heat_launch(function, values, extra_values);				\
		if (runs)									\
			burst_launched(device);							\
		if (runs && detour_on()) {							\
			struct need need = needs;						\
												\
			if (detour_begin(&detour, stream, per_thread, fits, &need)) {		\
				place;								\
				CALL_REAL(result, name, arguments);				\
				back;								\
				done = detour_end(&detour, result);				\
			}									\
		}										\
		if (!done)									\
			CALL_REAL(result, name, arguments);					\
		if (!result && runs && device) {						\
			counters_launched(device, stream, per_thread, 1);			\
			burst_launched(device);							\
		}										\
		if (done)									\
			gate_leave();								\
		else										\
			turn_leave(stream, per_thread);						\
		return result;									\
	}

/* Of a wrapper that has the stream as a parameter. */
#define PLACE const CUstream theirs = hStream; hStream = detour.stream
#define BACK hStream = theirs

#define KERNEL											\
	(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,	\
	 unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,		\
	 unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
#define KERNEL_ARGUMENTS									\
	(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes,	\
	 hStream, kernelParams, extra)
#define KERNEL_NEEDS { .function = f }
LAUNCH(cuLaunchKernel, KERNEL, KERNEL_ARGUMENTS, f, hStream, false, kernelParams, extra, KERNEL_NEEDS, PLACE, BACK)
LAUNCH(cuLaunchKernel_ptsz, KERNEL, KERNEL_ARGUMENTS, f, hStream, true, kernelParams, extra, KERNEL_NEEDS, PLACE, BACK)

#define COOPERATIVE										\
	(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,	\
	 unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,		\
	 unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)
#define COOPERATIVE_ARGUMENTS									\
	(f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes,	\
	 hStream, kernelParams)
#define COOPERATIVE_NEEDS							\
	{ .function = f, .blocks = (uint64_t)gridDimX * gridDimY * gridDimZ,	\
	  .threads = (int)(blockDimX * blockDimY * blockDimZ), .shared = sharedMemBytes }
LAUNCH(cuLaunchCooperativeKernel, COOPERATIVE, COOPERATIVE_ARGUMENTS, f, hStream, false, kernelParams, NULL,
       COOPERATIVE_NEEDS, PLACE, BACK)
LAUNCH(cuLaunchCooperativeKernel_ptsz, COOPERATIVE, COOPERATIVE_ARGUMENTS, f, hStream, true, kernelParams, NULL,
       COOPERATIVE_NEEDS, PLACE, BACK)

#define EX (const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
#define EX_ARGUMENTS (config, f, kernelParams, extra)
#define EX_STREAM (config ? config->hStream : NULL)
#define EX_NEEDS need_of(f, config)
/* The program's configuration is left alone: it may be used by several threads. */
#define EX_PLACE								\
	const CUlaunchConfig *const theirs = config;				\
	CUlaunchConfig elsewhere = theirs ? *theirs : (CUlaunchConfig){ 0 };	\
										\
	elsewhere.hStream = detour.stream;					\
	config = theirs ? &elsewhere : NULL
#define EX_BACK config = theirs
LAUNCH(cuLaunchKernelEx, EX, EX_ARGUMENTS, f, EX_STREAM, false, kernelParams, extra, EX_NEEDS, EX_PLACE, EX_BACK)
LAUNCH(cuLaunchKernelEx_ptsz, EX, EX_ARGUMENTS, f, EX_STREAM, true, kernelParams, extra, EX_NEEDS, EX_PLACE, EX_BACK)

/* Launches of CUDA 2, which still exist, always in the legacy stream or a given one; their parameters were set one by
 * one before. Those that name no stream run on all SMs. */
#define WIDE(name, parameters, arguments)						\
	WRAPPER name parameters								\
	{										\
		struct device *device;							\
		CUresult result;							\
		bool runs;								\
											\
		PASS_INSIDE(name, arguments);						\
		device = enter(NULL, false);						\
		runs = stream_runs(NULL, false);					\
		if (runs && heat_is_wanted())						\
			heat_launch(f, NULL, NULL);					\
		if (runs)								\
			burst_launched(device);						\
		if (runs && detour_on())						\
			detour_stay(NULL, false);					\
		CALL_REAL(result, name, arguments);					\
		if (!result && runs && device) {					\
			counters_launched(device, NULL, false, 1);			\
			burst_launched(device);						\
		}									\
		turn_leave(NULL, false);						\
		return result;								\
	}
WIDE(cuLaunch, (CUfunction f), (f))
WIDE(cuLaunchGrid, (CUfunction f, int grid_width, int grid_height), (f, grid_width, grid_height))
LAUNCH(cuLaunchGridAsync, (CUfunction f, int grid_width, int grid_height, CUstream hStream),
       (f, grid_width, grid_height, hStream), f, hStream, false, NULL, NULL, KERNEL_NEEDS, PLACE, BACK)

/* One launch per device, each in a stream of its own, whose context need not be the current one. */
static void count_one(const CUDA_LAUNCH_PARAMS *launch)
{
	CUcontext context;
	struct device *device;

	ours_enter();
	if (!real.cuStreamGetCtx || real.cuStreamGetCtx(launch->hStream, &context) ||
	    real.cuCtxPushCurrent_v2(context)) {
		ours_leave();
		return;
	}
	device = device_current();
	if (device)
		counters_launched(device, launch->hStream, false, 1);
	real.cuCtxPopCurrent_v2(&context);
	ours_leave();
}

WRAPPER cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList,
					     unsigned int numDevices, unsigned int flags)
{
	CUresult result;
	bool runs;

	PASS_INSIDE(cuLaunchCooperativeKernelMultiDevice, (launchParamsList, numDevices, flags));
	device_current();
	turn_enter(TURN_OTHER, NULL, false);
	/* The launch needs a turn on every device at once. */
	for (unsigned int i = 0; launchParamsList && __atomic_load_n(&turn_any, __ATOMIC_RELAXED) && i < numDevices;)
		i = turn_hold(TURN_OTHER, launchParamsList[i].hStream, false) ? 0 : i + 1;
	/* It cannot be captured in any of the streams (CUDA_ERROR_NOT_SUPPORTED). */
	runs = launchParamsList != NULL;
	for (unsigned int i = 0; runs && detour_on() && i < numDevices; i++)
		detour_stay(launchParamsList[i].hStream, false);
	for (unsigned int i = 0; runs && heat_is_wanted() && i < numDevices; i++)
		heat_launch(launchParamsList[i].function, launchParamsList[i].kernelParams, NULL);
	CALL_REAL(result, cuLaunchCooperativeKernelMultiDevice,
		  (launchParamsList, numDevices, flags));
	for (unsigned int i = 0; runs && !result && i < numDevices; i++)
		count_one(&launchParamsList[i]);
	for (unsigned int i = 0; runs && detour_on() && i < numDevices; i++)
		detour_worked(launchParamsList[i].hStream, false);
	gate_leave();
	return result;
}

/* Events for all streams of a context; the driver refuses where one of them is captured. */
#define OF_CONTEXT(name, type, context)		\
	WRAPPER name(type hCtx, CUevent hEvent)		\
	{						\
		CUresult result;			\
							\
		PASS_INSIDE(name, (hCtx, hEvent));	\
		turn_enter_context(context);	\
		CALL_REAL(result, name, (hCtx, hEvent));	\
		turn_leave_context(context);		\
		return result;				\
	}

OF_CONTEXT(cuCtxRecordEvent, CUcontext, hCtx)
OF_CONTEXT(cuCtxWaitEvent, CUcontext, hCtx)

/* Return a green context's context, by cuCtxFromGreenCtx; NULL for none. */
static CUcontext of_green(CUgreenCtx green)
{
	CUcontext context = NULL;
	CUresult result = CUDA_ERROR_NOT_SUPPORTED;

	if (green && real.cuCtxFromGreenCtx)
		CALL_REAL(result, cuCtxFromGreenCtx, (&context, green));
	return result ? NULL : context;
}

OF_CONTEXT(cuGreenCtxRecordEvent, CUgreenCtx, of_green(hCtx))
OF_CONTEXT(cuGreenCtxWaitEvent, CUgreenCtx, of_green(hCtx))

/* Wrappers that only pass the gates, made from the table. */
#define MAKE_ONLY(name, parameters, arguments, work)			\
	WRAPPER name parameters						\
	{								\
		CUresult result;					\
									\
		PASS_INSIDE(name, arguments);				\
		turn_enter(work, hStream, PER_THREAD(name));		\
		CALL_REAL(result, name, arguments);			\
		turn_leave(hStream, PER_THREAD(name));			\
		return result;						\
	}
#define MAKE_GATED(name, parameters, arguments) MAKE_ONLY(name, parameters, arguments, TURN_OTHER)
#define MAKE_JOIN(name, parameters, arguments) MAKE_ONLY(name, parameters, arguments, TURN_JOINS)
#include "made.h"
