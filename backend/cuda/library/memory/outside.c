// SPDX-License-Identifier: Apache-2.0
#include "outside.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "life.h"
#include "log.h"

static const char *const prefixes[] = { "/dev/infiniband/uverbs", "/dev/gdrdrv", "/dev/nvidia-fs" };

static bool seen;	/* atomically */

static bool is_one(const char *path)
{
	for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++)
		if (!strncmp(path, prefixes[i], strlen(prefixes[i])))
			return true;
	return false;
}

/* The result of a look at the process's descriptors. */
enum look { NONE_OPEN, ONE_OPEN, NOT_KNOWN };

static enum look look(void)
{
	/* The thread's own: /proc/self/fd shows none where the main thread has ended. */
	DIR *directory = opendir("/proc/thread-self/fd");
	enum look look = directory ? NONE_OPEN : NOT_KNOWN;
	const struct dirent *entry;
	bool itself = false;
	char path[64];

	while (look == NONE_OPEN) {
		errno = 0;
		entry = readdir(directory);
		if (!entry) {
			/* A directory without the descriptor by which it is read does not show other descriptors
			 * either. */
			if (errno || !itself)
				look = NOT_KNOWN;
			break;
		}
		if (entry->d_name[0] == '.')
			continue;
		itself |= atoi(entry->d_name) == dirfd(directory);

		const ssize_t length = readlinkat(dirfd(directory), entry->d_name, path, sizeof(path) - 1);

		if (length < 0 && errno != ENOENT)	/* it was closed meanwhile */
			look = NOT_KNOWN;
		if (length < 0)
			continue;
		path[length] = 0;
		if (is_one(path))
			look = ONE_OPEN;
	}
	if (directory)
		closedir(directory);
	return look;
}

bool outside_is_open(void)
{
	enum look found = __atomic_load_n(&seen, __ATOMIC_RELAXED) ? ONE_OPEN : look();

	if (found == NOT_KNOWN)
		log_line("which devices are open cannot be seen: what one of them may reach stays on the GPU");
	if (found == ONE_OPEN)
		__atomic_store_n(&seen, true, __ATOMIC_RELAXED);
	return found != NONE_OPEN;
}

static void forget(void)
{
	seen = false;
}

LIFE(.stage = LIFE_FOREIGN, .forget = forget);
