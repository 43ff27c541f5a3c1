/* SPDX-License-Identifier: Apache-2.0 */
/* The importing side of legacy IPC, which opens memory of another process (ipc.h). */
#ifndef GGROUP_CUDA_IMPORTER_H
#define GGROUP_CUDA_IMPORTER_H

#include "device.h"
#include "ipc.h"

/* Open a handle, anew or once more: "the reference count on the handle is incremented by 1 and the existing device
 * pointer is returned" (cuIpcOpenMemHandle). Between driver_enter and driver_leave. */
CUresult importer_open(CUdeviceptr *address, const struct ipc_handle *handle);
/* Close the memory that contains `address` once; false where none does. */
bool importer_close(CUdeviceptr address);

/* Return whether memory of another process is mapped here, or about to be. */
bool importer_any(void);
#endif
