/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Legacy IPC (cuIpcGetMemHandle and the like) of elastic memory, between two programs that both have this library. The
 * driver has it for memory of cuMemAlloc alone, so the 64 bytes of a handle are ours: they name a socket of the exporting
 * process. Who opens one asks there for descriptors of the chunks, and maps them.
 *
 * What is exported stays on the GPU from then on. Its chunks are replaced by ones that can be exported, when somebody asks
 * for the first handle.
 */
#ifndef GGROUP_CUDA_IPC_H
#define GGROUP_CUDA_IPC_H

#include <sys/socket.h>
#include <sys/un.h>

#include "state.h"

#define IPC_MAGIC "ggroupIP"

/* A handle. */
struct ipc_handle {
	char magic[8];		/* IPC_MAGIC, without its end */
	uint64_t token;		/* of the process: names its socket, and is no secret (/proc/net/unix) */
	uint64_t secret;	/* ... is one of those who were given a handle */
	uint64_t address;	/* there, of the region */
	uint64_t serial;	/* of the region: no later one has it */
	uint64_t bytes;		/* of all of it */
	uint64_t offset;	/* of the allocation in it */
	uint64_t reserved;
};

_Static_assert(sizeof(struct ipc_handle) == sizeof(CUipcMemHandle), "a handle has the driver's size");

/* What an answer is made of: each message has so many chunks and their descriptors (SCM_RIGHTS), up to the last. */
#define IPC_CHUNKS 32
struct ipc_part {
	uint32_t count;		/* 0: there is no such memory */
	uint32_t last;
	uint64_t bytes[IPC_CHUNKS];
};

/* The address of the socket of the process with that token, in the abstract namespace (unix(7)); its length. */
socklen_t ipc_address(uint64_t token, struct sockaddr_un *address);
/* Has this process answer from now on: its token and secret are in `handle` then. False: it cannot. */
bool ipc_serve(struct ipc_handle *handle);
/* Whether it is this process's. */
bool ipc_own(uint64_t token);

/* Whether memory of another process is mapped here, or is about to be. */
bool ipc_imported(void);
void ipc_context_gone(CUcontext context);
void ipc_forget(void);		/* in the child of fork() */
void ipc_forget_server(void);

#endif
