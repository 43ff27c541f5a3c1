// SPDX-License-Identifier: Apache-2.0
/* Entry points of legacy IPC (ipc.h). */

#include <string.h>

#include "driver.h"
#include "exporter.h"
#include "foreign.h"
#include "importer.h"
#include "mover.h"
#include "pin.h"
#include "region.h"
#include "wrapper.h"

static CUresult get_handle(CUipcMemHandle *handle, const struct region_about *about)
{
	struct ipc_handle ours = {
		.address = about->region.address, .serial = about->region.serial, .bytes = about->region.bytes,
		.offset = about->start - about->region.address,
	};
	CUresult result = pin_range(about->region.address, about->region.bytes);

	if (result == CUDA_SUCCESS)
		result = mover_share(about->device, about->region.address, about->region.bytes);
	if (result != CUDA_SUCCESS)
		return result;
	memcpy(ours.magic, IPC_MAGIC, sizeof(ours.magic));
	if (!exporter_serve(&ours))
		return CUDA_ERROR_NOT_SUPPORTED;
	foreign_share();
	memcpy(handle, &ours, sizeof(*handle));
	return CUDA_SUCCESS;
}

WRAPPER cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	struct region_about about;
	CUstreamCaptureMode mode;
	CUresult result;

	PASS_INSIDE(cuIpcGetMemHandle, (pHandle, dptr));
	if (!pHandle || !region_about(dptr, &about)) {
		CALL_REAL(result, cuIpcGetMemHandle, (pHandle, dptr));
		if (result == CUDA_SUCCESS)
			foreign_share();
		return result;
	}
	mode = driver_enter();
	result = get_handle(pHandle, &about);
	driver_leave(mode);
	return result;
}

/* False: the handle is not one of the library's. */
static bool open_ours(CUdeviceptr *address, const CUipcMemHandle *handle, CUresult *result)
{
	struct ipc_handle ours;
	CUstreamCaptureMode mode;

	memcpy(&ours, handle, sizeof(ours));
	if (!address || memcmp(ours.magic, IPC_MAGIC, sizeof(ours.magic)))
		return false;
	mode = driver_enter();
	*result = importer_open(address, &ours);
	driver_leave(mode);
	return true;
}

#define OPEN(name)									\
	WRAPPER name(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)	\
	{										\
		CUresult result;							\
											\
		PASS_INSIDE(name, (pdptr, handle, Flags));				\
		if (open_ours(pdptr, &handle, &result))					\
			return result;							\
		CALL_REAL(result, name, (pdptr, handle, Flags));			\
		if (result == CUDA_SUCCESS)						\
			foreign_share();						\
		return result;								\
	}

OPEN(cuIpcOpenMemHandle)
OPEN(cuIpcOpenMemHandle_v2)

WRAPPER cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	CUresult result;

	PASS_INSIDE(cuIpcCloseMemHandle, (dptr));
	if (importer_close(dptr))
		return CUDA_SUCCESS;
	CALL_REAL(result, cuIpcCloseMemHandle, (dptr));
	return result;
}
