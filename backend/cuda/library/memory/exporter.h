/* SPDX-License-Identifier: Apache-2.0 */
/* The side of legacy IPC that has the memory: a thread that hands out descriptors of its chunks (ipc.h). */
#ifndef GGROUP_CUDA_EXPORTER_H
#define GGROUP_CUDA_EXPORTER_H

#include "device.h"
#include "ipc.h"

/* Has this process answer from now on: its token, secret and name are in `handle` then. False: it cannot. */
bool exporter_serve(struct ipc_handle *handle);
/* Whether a token is this process's. */
bool exporter_own(uint64_t token);

#endif
