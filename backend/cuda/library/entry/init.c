// SPDX-License-Identifier: Apache-2.0
/* The initialisation of the driver: what it reads of the environment is set before. */

#include "space.h"
#include "wrapper.h"

WRAPPER cuInit(unsigned int Flags)
{
	CUresult result;

	PASS_INSIDE(cuInit, (Flags));
	space_enter();
	CALL_REAL(result, cuInit, (Flags));
	return result;
}
