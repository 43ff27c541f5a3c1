/* SPDX-License-Identifier: Apache-2.0 */
/* The exporting side of legacy IPC: a thread that hands out descriptors of the chunks (ipc.h). */
#ifndef GGROUP_CUDA_EXPORTER_H
#define GGROUP_CUDA_EXPORTER_H

#include "device.h"
#include "ipc.h"

/* Start to serve importers, and put this process's token, secret and name into `handle`. False where that fails. */
bool exporter_serve(struct ipc_handle *handle);
/* Return whether a token is this process's. */
bool exporter_own(uint64_t token);

#endif
