/* SPDX-License-Identifier: Apache-2.0 */
/* The side of legacy IPC that opens what another process has (ipc.h). */
#ifndef GGROUP_CUDA_IMPORTER_H
#define GGROUP_CUDA_IMPORTER_H

#include "device.h"
#include "ipc.h"

/* Opens a handle anew, or once more: "the reference count on the handle is incremented by 1 and the existing device
 * pointer is returned" (cuIpcOpenMemHandle). Between driver_enter and driver_leave. */
CUresult importer_open(CUdeviceptr *address, const struct ipc_handle *handle);
/* Closes what holds `address` once; false: nothing that was opened does. */
bool importer_close(CUdeviceptr address);

/* Whether memory of another process is mapped here, or is about to be. */
bool importer_any(void);
#endif
