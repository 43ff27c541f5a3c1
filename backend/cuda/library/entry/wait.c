// SPDX-License-Identifier: Apache-2.0
/*
 * Calls that ask whether work is done, or wait for it. They pass the gate even when it is closed, except while the
 * program stands by: in a checkpointed program the driver reads memory that is not there, and the process dies of
 * SIGSEGV (measured: docs/nvidia.md). Calls that bring work, or memory, wait in the driver by themselves.
 */

#include "burst.h"
#include "driver.h"
#include "wrapper.h"
#include "gate.h"

#define MAKE_WAIT(name, parameters, arguments)		\
	WRAPPER name parameters				\
	{						\
		CUresult result;			\
							\
		PASS_INSIDE(name, arguments);		\
		gate_wait_enter();			\
		CALL_REAL(result, name, arguments);	\
		if (!result)				\
			burst_waited();			\
		gate_wait_leave();			\
		return result;				\
	}
#include "made.h"
