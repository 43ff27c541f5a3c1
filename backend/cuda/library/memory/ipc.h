/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Legacy IPC (cuIpcGetMemHandle and the like) of elastic memory, between two programs that both have this library. The
 * driver has it for memory of cuMemAlloc alone, so the 64 bytes of a handle are ours: they name a socket of the exporting
 * process. Who opens one asks there for descriptors of the chunks, and maps them.
 *
 * Whoever is quicker, or outlives the exporter, can have a socket of that name: so the two ends look at each other (the
 * kernel knows who called listen(2) and connect(2)). Each has to run as the same user as the other, or as root, and who
 * listens has to be the process that the handle names, before it is told the secret. A pid is a name in a namespace: to a
 * handle of another pid namespace its number says nothing, and then the user alone counts; nor has a handle of the library
 * of 0.1 a number. Root opens what a process of
 * any user exports, but only where it can tell that process by its number.
 *
 * What is exported stays on the GPU from then on. Its chunks are replaced by ones that can be exported, when somebody asks
 * for the first handle.
 */
#ifndef GGROUP_CUDA_IPC_H
#define GGROUP_CUDA_IPC_H

#include <sys/socket.h>
#include <sys/un.h>

#include "device.h"

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
	uint32_t pid;		/* of the process; 0 of one with the library of 0.1 */
	uint32_t pid_namespace;	/* in which it is called that: its inode; 0 if that is not known */
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
/* The inode of this process's pid namespace; 0: it is not known. */
uint32_t ipc_pid_namespace(void);

#endif
