// SPDX-License-Identifier: Apache-2.0
/* Loading and unloading of code: tells heat.h which handles are kernels, and when handles become unknown. */

#include <string.h>

#include "driver.h"
#include "heat.h"
#include "wrapper.h"

WRAPPER cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	CUresult result;

	PASS_INSIDE(cuLibraryGetKernel, (pKernel, library, name));
	CALL_REAL(result, cuLibraryGetKernel, (pKernel, library, name));
	if (!result)
		heat_kernels(pKernel, 1, library);
	return result;
}

WRAPPER cuLibraryEnumerateKernels(CUkernel *handles, unsigned int numKernels, CUlibrary lib)
{
	CUresult result;

	PASS_INSIDE(cuLibraryEnumerateKernels, (handles, numKernels, lib));
	/* There may be fewer: the driver leaves the rest as it was, so the array is cleared first. */
	if (handles)
		memset(handles, 0, numKernels * sizeof(*handles));
	CALL_REAL(result, cuLibraryEnumerateKernels, (handles, numKernels, lib));
	if (!result && handles)
		heat_kernels(handles, numKernels, lib);
	return result;
}

WRAPPER cuLibraryUnload(CUlibrary library)
{
	CUresult result;

	PASS_INSIDE(cuLibraryUnload, (library));
	heat_code_goes();
	CALL_REAL(result, cuLibraryUnload, (library));
	if (!result)
		heat_library_gone(library);
	heat_code_gone();
	return result;
}

WRAPPER cuModuleUnload(CUmodule hmod)
{
	CUresult result;

	PASS_INSIDE(cuModuleUnload, (hmod));
	heat_code_goes();
	CALL_REAL(result, cuModuleUnload, (hmod));
	heat_code_gone();
	return result;
}
