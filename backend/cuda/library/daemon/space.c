// SPDX-License-Identifier: Apache-2.0
#include "space.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "sight.h"

#define VARIABLE "CUDA_MPS_PIPE_DIRECTORY"
/* Suffix of a tree's socket, and what the directory of its spaces has in its place: backend/space/space.py. */
#define SOCKET ".sock"
#define DIRECTORY ".mps"

/* Most bytes of the path of a pipe; the driver's sockets are below it, and their paths have at most 107. */
#define PATH 128

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool asked;		/* with the lock */
static uint64_t number;		/* atomically: of the space, 0 for none */

/* The start of all paths of the daemon's servers; false where that is too long. */
static bool directory(char *path, size_t size, const char *socket)
{
	size_t length = strlen(socket);
	const size_t suffix = sizeof(SOCKET) - 1;

	if (length > suffix && !strcmp(socket + length - suffix, SOCKET))
		length -= suffix;
	return snprintf(path, size, "%.*s%s/", (int)length, socket, DIRECTORY) < (int)size;
}

static void set(const char *socket, uint64_t found)
{
	const char *before = getenv(VARIABLE);
	char path[PATH];
	bool ours;

	if (!directory(path, sizeof(path) - sizeof("00000000/pipe"), socket))
		return;
	ours = before && !strncmp(before, path, strlen(path));
	if (before && !ours) {
		log_line("%s=%s: left as it is", VARIABLE, before);
	} else if (found) {
		snprintf(path + strlen(path), sizeof("00000000/pipe"), "%08x/pipe", (unsigned int)found);
		setenv(VARIABLE, path, 1);
		__atomic_store_n(&number, found, __ATOMIC_RELEASE);
		log_line("%s=%s", VARIABLE, path);
	} else if (ours) {
		unsetenv(VARIABLE);
	}
}

void space_enter(void)
{
	const char *socket = getenv("GGROUP_SOCKET");
	uint64_t found = 0;

	if (!socket || !*socket)
		return;
	pthread_mutex_lock(&lock);
	if (!asked && sight_space(&found))
		set(socket, found);
	asked = true;
	pthread_mutex_unlock(&lock);
}

bool space_request(struct message *message)
{
	const uint64_t known = __atomic_load_n(&number, __ATOMIC_ACQUIRE);

	*message = (struct message){ .op = OP_SPACE, .args = { known } };
	return known != 0;
}

void space_forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	asked = false;
	number = 0;
}
