// SPDX-License-Identifier: Apache-2.0
/* Code that is loaded and unloaded: which handles are of kernels, and when nothing is known of any (heat.h). */

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
	/* Fewer may be there: the rest is left as it was, so it is cleared first where it is ours to read. */
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
