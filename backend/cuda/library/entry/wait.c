// SPDX-License-Identifier: Apache-2.0
/*
 * Calls that ask whether work is done, or wait for it. They pass the gate even when it is closed, except while the
 * program stands by: in a checkpointed program the driver reads memory that is not there, and the process dies of
 * SIGSEGV (measured: docs/nvidia.md). Calls that bring work, or memory, wait in the driver by themselves.
 */

#include "burst.h"
#include "detour.h"
#include "driver.h"
#include "wrapper.h"
#include "gate.h"

/* Work that is away belongs to its stream (detour.h). */
#define MAKE(name, parameters, arguments, home)		\
	WRAPPER name parameters				\
	{						\
		CUresult result;			\
							\
		PASS_INSIDE(name, arguments);		\
		gate_wait_enter();			\
		if (detour_on()) {			\
			home;				\
		}					\
		CALL_REAL(result, name, arguments);	\
		if (!result)				\
			burst_waited();			\
		gate_wait_leave();			\
		return result;				\
	}

/* The context of the call: the current one, of a call that names none. */
static const CUcontext ctx;

#define MAKE_WAIT(name, parameters, arguments) MAKE(name, parameters, arguments, )
#define MAKE_WAIT_STREAM(name, parameters, arguments)	\
	MAKE(name, parameters, arguments, detour_home(hStream, PER_THREAD(name)))
#define MAKE_WAIT_CONTEXT(name, parameters, arguments)	\
	MAKE(name, parameters, arguments, detour_home_context(ctx ? ctx : driver_context()))
#include "made.h"
