/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Legacy IPC (cuIpcGetMemHandle and the like) of elastic memory, between two programs that both have this library. The
 * driver has it only for memory of cuMemAlloc, so the 64 bytes of a handle are the library's own: they name a socket of
 * the exporting process. The importing process asks there for descriptors of the chunks, and maps them.
 *
 * A process that is quicker than the exporter, or outlives it, can have a socket of that name. So each end checks the
 * other (the kernel knows which process called listen(2) and connect(2)). Each has to run as the same user as the
 * other, or as root, and the listener has to be the process that the handle names, before it is told the secret. A pid
 * is a name in a namespace: for a handle of another pid namespace its number says nothing, and only the user counts; a
 * handle of the library of 0.1 has no number at all. Root opens what a process of any user exports, but only where the
 * number identifies that process.
 *
 * Exported memory stays on the GPU from then on. Its chunks are replaced by exportable ones at the request for the
 * first handle.
 */
#ifndef GGROUP_CUDA_IPC_H
#define GGROUP_CUDA_IPC_H

#include <sys/socket.h>
#include <sys/un.h>

#include "device.h"

#define IPC_MAGIC "ggroupIP"

/* A handle. */
struct ipc_handle {
	char magic[8];		/* IPC_MAGIC, without its terminator */
	uint64_t token;		/* of the process: names its socket, and is no secret (/proc/net/unix) */
	uint64_t secret;	/* shared with every process that was given a handle */
	uint64_t address;	/* of the region, in the exporting process */
	uint64_t serial;	/* of the region: no later region has it */
	uint64_t bytes;		/* of the whole region */
	uint64_t offset;	/* of the allocation in it */
	uint32_t pid;		/* of the process; 0 with the library of 0.1 */
	uint32_t pid_namespace;	/* inode of the namespace of that pid; 0 if unknown */
};

_Static_assert(sizeof(struct ipc_handle) == sizeof(CUipcMemHandle), "a handle has the driver's size");

/* A message of an answer: each has up to IPC_CHUNKS chunks and their descriptors (SCM_RIGHTS), until the last. */
#define IPC_CHUNKS 32
struct ipc_part {
	uint32_t count;		/* 0: there is no such memory */
	uint32_t last;
	uint64_t bytes[IPC_CHUNKS];
};

/* Make the address of the socket of the process with that token, in the abstract namespace (unix(7)); returns its
 * length. */
socklen_t ipc_address(uint64_t token, struct sockaddr_un *address);
/* Return the inode of this process's pid namespace; 0 where it is unknown. */
uint32_t ipc_pid_namespace(void);

#endif
