// SPDX-License-Identifier: Apache-2.0
#include "ipc.h"

#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>

#include "glibc.h"

socklen_t ipc_address(uint64_t of, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){ .sun_family = AF_UNIX };
	/* The first byte is 0. */
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
			   (size_t)snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1,
					    "ggroup-cuda-ipc-%016llx", (unsigned long long)of));
}

uint32_t ipc_pid_namespace(void)
{
	struct stat status;

	return glibc_stat("/proc/self/ns/pid", &status) ? 0 : (uint32_t)status.st_ino;
}
