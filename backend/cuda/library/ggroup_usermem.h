/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For programs: how much GPU memory to give back before it is taken. C11 or C++, nothing to link.
 *
 *	int fd = ggroup_usermem_open("/run/ggroup", 0);
 *	struct ggroup_usermem record;
 *
 *	while (ggroup_usermem_wait(fd, -1, &record) == 1)
 *		shrink_a_cache(record.bytes);	// frees; 50 ms later the rest is moved to the host
 *
 * A process is in the tree once it has a context, or was started by `ggroupfs run -p`.
 */
#ifndef GGROUP_USERMEM_H
#define GGROUP_USERMEM_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

struct ggroup_usermem {
	uint64_t bytes;	/* to give back */
	uint64_t seq;	/* number of the record, from 1 */
};

/* Open the usermemfd of the calling process on a GPU of the tree that is mounted on `mount`. Returns the descriptor, to
 * be closed with close(2), or -1 and errno. */
static inline int ggroup_usermem_open(const char *mount, int gpu)
{
	char path[4096];
	int length = snprintf(path, sizeof(path), "%s/self/%d/usermemfd", mount, gpu);

	if (length < 0 || (size_t)length >= sizeof(path)) {
		errno = ENAMETOOLONG;
		return -1;
	}
	return open(path, O_RDONLY | O_CLOEXEC);
}

/* Wait for the latest record. Returns 1 and `record`; 0 after `timeout` ms (-1: never); -1 and errno, ENODEV or
 * ENOTCONN when the tree is gone. */
static inline int ggroup_usermem_wait(int fd, int timeout, struct ggroup_usermem *record)
{
	for (;;) {
		struct pollfd waits = { fd, POLLIN, 0 };
		int ready = poll(&waits, 1, timeout);
		ssize_t got;

		if (ready < 0 && errno == EINTR)
			continue;
		if (ready <= 0)
			return ready;
		got = read(fd, record, sizeof(*record));
		if (got == (ssize_t)sizeof(*record))
			return 1;
		if (got >= 0) {
			errno = EIO;
			return -1;
		}
		if (errno != EAGAIN && errno != EINTR)	/* EAGAIN: another thread was faster */
			return -1;
	}
}

#endif
