// SPDX-License-Identifier: Apache-2.0
/*
 * Contexts that come and go. Much of the library's state is in one: markers, streams of the mover, the program's
 * allocations. So a call that may be about to destroy a context is announced first, and its result noted afterwards.
 */

#include "counters.h"
#include "detour.h"
#include "driver.h"
#include "gate.h"
#include "heat.h"
#include "life.h"
#include "ours.h"
#include "quiet.h"
#include "stream.h"
#include "wrapper.h"

struct ending {
	CUcontext context;	/* NULL: there is none */
	CUdevice ordinal;
	bool entered;
};

static struct ending begin(CUcontext context)
{
	struct ending ending = { .context = context };

	if (context) {
		device_context_ends(context);
		heat_code_goes();
	}
	/* After the above: the mover may hold the context while it closes the gate. */
	gate_enter();
	if (context) {
		counters_context_held(context);
		/* A drain waits for contexts with this gate open (turn.c). */
		quiet_context_ends(context);
	}
	ours_enter();
	detour_context_ends(context);
	return ending;
}

/* Called for each device, as any may have memory that was allocated in the context. */
static void tell_parts(struct device *device, void *context)
{
	const CUstreamCaptureMode mode = driver_enter();

	life_context_gone(device, context);
	driver_leave(mode);
}

static void end(const struct ending *ending, bool gone)
{
	if (ending->context && gone) {
		counters_context_gone(ending->context);
		stream_context_gone(ending->context);
		device_context_forgotten(ending->context);
		device_each(tell_parts, ending->context);
	} else if (ending->context) {
		counters_context_stays(ending->context);
	}
	detour_context_ended(ending->context, gone);
	if (ending->context)
		quiet_context_ended();
	ours_leave();
	gate_leave();
	if (ending->context) {
		heat_code_gone();
		device_context_ended(gone);
	}
}

/* cuCtxDestroy destroys the context whatever is left in it. */
#define DESTROY(name)						\
	WRAPPER name(CUcontext ctx)				\
	{							\
		struct ending ending;				\
		CUresult result;				\
								\
		PASS_INSIDE(name, (ctx));			\
		ending = begin(ctx);				\
		result = real.name(ctx);			\
		end(&ending, result == CUDA_SUCCESS);		\
		return result;					\
	}

DESTROY(cuCtxDestroy)
DESTROY(cuCtxDestroy_v2)

/* Times that a call is tried before its error counts as one that stays. */
#define TRIES 3

static CUresult is_active(CUdevice device, int *active)
{
	CUresult result = CUDA_SUCCESS;
	unsigned int flags;

	*active = 0;
	if (!real.cuDevicePrimaryCtxGetState)
		return result;
	for (int try = 0; try < TRIES; try++) {
		result = real.cuDevicePrimaryCtxGetState(device, &flags, active);
		if (result == CUDA_SUCCESS)
			break;
	}
	return result;
}

/* Get the primary context of a device; NULL where it has none now. After an error the caller destroys none: what is in
 * it would stay in the books for good. */
static CUresult primary_of(CUdevice device, CUcontext *context)
{
	int active;
	CUresult result = is_active(device, &active);

	*context = NULL;
	if (result != CUDA_SUCCESS || !active)
		return result;
	result = real.cuDevicePrimaryCtxRetain(context, device);
	if (result != CUDA_SUCCESS)
		return result;
	if (real.cuDevicePrimaryCtxRelease_v2)
		real.cuDevicePrimaryCtxRelease_v2(device);
	else
		real.cuDevicePrimaryCtxRelease(device);
	return result;
}

/* Return whether the context is gone, after a call that succeeded. */
static bool has_gone(CUdevice device)
{
	int active;

	return is_active(device, &active) != CUDA_SUCCESS || !active;
}

/* A primary context is destroyed when it has been released as often as retained; a reset destroys it at once. An error
 * of the driver about the device is passed to the program, as without the library. */
#define PRIMARY(name)								\
	WRAPPER name(CUdevice dev)						\
	{									\
		struct ending ending;						\
		CUcontext context;						\
		CUresult result;						\
										\
		PASS_INSIDE(name, (dev));					\
		ours_enter();							\
		result = primary_of(dev, &context);				\
		ours_leave();							\
		if (result != CUDA_SUCCESS)					\
			return result;						\
		ending = begin(context);					\
		result = real.name(dev);					\
		end(&ending, result == CUDA_SUCCESS && context && has_gone(dev));	\
		return result;							\
	}

PRIMARY(cuDevicePrimaryCtxRelease)
PRIMARY(cuDevicePrimaryCtxRelease_v2)
PRIMARY(cuDevicePrimaryCtxReset)
PRIMARY(cuDevicePrimaryCtxReset_v2)

/* The old pair of cuCtxAttach and cuCtxDetach: the last detach destroys. Only a handle that is no longer valid tells
 * which detach that was. */
WRAPPER cuCtxDetach(CUcontext ctx)
{
	struct ending ending;
	CUresult result;
	unsigned int version;

	PASS_INSIDE(cuCtxDetach, (ctx));
	ending = begin(ctx ? ctx : driver_context());
	result = real.cuCtxDetach(ctx);
	end(&ending, !result && (!real.cuCtxGetApiVersion ||
				 real.cuCtxGetApiVersion(ending.context, &version)));
	return result;
}

/* A green context is a context too, by cuCtxFromGreenCtx. */
WRAPPER cuGreenCtxDestroy(CUgreenCtx hCtx)
{
	CUresult result = CUDA_SUCCESS;
	CUcontext context = NULL;
	struct ending ending;

	PASS_INSIDE(cuGreenCtxDestroy, (hCtx));
	if (real.cuCtxFromGreenCtx && hCtx)
		CALL_REAL(result, cuCtxFromGreenCtx, (&context, hCtx));
	if (result != CUDA_SUCCESS)	/* else its memory would stay in the books */
		return result;
	ending = begin(context);
	result = real.cuGreenCtxDestroy(hCtx);
	end(&ending, result == CUDA_SUCCESS);
	return result;
}

/*
 * New contexts. cuCtxCreate makes its context current: the device is in use from here on, and the process arrives in
 * the tree before it has allocated anything else. A primary context is set up lazily; the first allocation or launch
 * finds it.
 */
#define CREATE(name, parameters, arguments)	\
	FORWARD_THEN(name, parameters, arguments, device_context_made(*pctx); device_current())

CREATE(cuCtxCreate, (CUcontext *pctx, unsigned int flags, CUdevice dev), (pctx, flags, dev))
CREATE(cuCtxCreate_v2, (CUcontext *pctx, unsigned int flags, CUdevice dev), (pctx, flags, dev))
CREATE(cuCtxCreate_v3,
       (CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags,
	CUdevice dev),
       (pctx, paramsArray, numParams, flags, dev))
CREATE(cuCtxCreate_v4,
       (CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev),
       (pctx, ctxCreateParams, flags, dev))
