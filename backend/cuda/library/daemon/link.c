/* SPDX-License-Identifier: Apache-2.0 */
#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "glibc.h"

/* First number for descriptors of the library, above those that programs take without asking (dup2). */
#define OUT_OF_THE_WAY 512

/* Uid that the kernel shows for a user without a number in this user namespace (fs.overflowuid). */
#define UNNAMED 65534

/* Descriptors that a message has room for: at least two, since CMSG_SPACE() rounds up. */
#define ROOM 2

_Static_assert(sizeof(struct message) == 64, "backend/door/wire.py");

static int adopt(struct descriptor *descriptor, int fd)
{
	struct stat status;
	int high = fcntl(fd, F_DUPFD_CLOEXEC, OUT_OF_THE_WAY);

	if (high >= 0) {
		close(fd);
		fd = high;
	}
	if (glibc_fstat(fd, &status)) {
		close(fd);
		return EBADF;
	}
	*descriptor = (struct descriptor){ fd, status.st_dev, status.st_ino };
	return 0;
}

bool link_ours(const struct descriptor *descriptor)
{
	struct stat status;

	return descriptor->fd >= 0 && !glibc_fstat(descriptor->fd, &status) &&
	       status.st_dev == descriptor->device && status.st_ino == descriptor->inode;
}

void link_drop(struct descriptor *descriptor)
{
	if (link_ours(descriptor))
		close(descriptor->fd);
	descriptor->fd = -1;
}

/* Return whether some users have no number here. In the initial user namespace, which maps all to themselves, none
 * has. */
static bool some_unnamed(void)
{
	FILE *file = fopen("/proc/self/uid_map", "re");
	unsigned int inside, outside, count;
	bool some;

	if (!file)
		return false;
	some = fscanf(file, "%u %u %u", &inside, &outside, &count) != 3 || count != UINT32_MAX;
	fclose(file);
	return some;
}

/* Return whether the listener is root's or of the program's own user. In a container with a user namespace, root
 * outside has no number, nor has any other user outside; only those can have put the socket at the path from there. */
static bool may_be_daemon(int fd)
{
	struct ucred peer;
	socklen_t length = sizeof(peer);

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length))
		return false;
	return !peer.uid || peer.uid == geteuid() || (peer.uid == UNNAMED && some_unnamed());
}

int link_open(struct descriptor *link, const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd;

	if (strlen(path) >= sizeof(address.sun_path))
		return ENAMETOOLONG;
	strcpy(address.sun_path, path);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return errno;
	/* unix(7): a full queue of connections gives EAGAIN; no connection stays in progress. */
	if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
		int error = errno;

		close(fd);
		return error;
	}
	if (!may_be_daemon(fd)) {
		close(fd);
		return EPERM;
	}
	return adopt(link, fd);
}

int link_pipe(struct descriptor ends[2])
{
	int fds[2];

	ends[0] = ends[1] = NO_DESCRIPTOR;
	if (pipe2(fds, O_CLOEXEC | O_NONBLOCK))
		return errno;
	if (adopt(&ends[0], fds[0])) {
		close(fds[1]);
		return EBADF;
	}
	if (adopt(&ends[1], fds[1])) {
		link_drop(&ends[0]);
		return EBADF;
	}
	return 0;
}

int link_send(const struct descriptor *link, const struct message *message)
{
	ssize_t sent;

	if (!link_ours(link))
		return EBADF;
	do
		sent = send(link->fd, message, sizeof(*message), MSG_DONTWAIT | MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	return sent == sizeof(*message) ? 0 : sent < 0 ? errno : EIO;
}

int link_receive(const struct descriptor *link, struct message *message, int *fd)
{
	struct iovec part = { message, sizeof(*message) };
	union {
		char room[CMSG_SPACE(ROOM * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct msghdr header = {
		.msg_iov = &part, .msg_iovlen = 1,
		.msg_control = &control, .msg_controllen = sizeof(control),
	};
	struct cmsghdr *rights;
	int fds[ROOM];
	size_t count = 0;
	ssize_t got;

	*fd = -1;
	if (!link_ours(link))
		return EBADF;
	do
		got = recvmsg(link->fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (got < 0 && errno == EINTR);
	if (got < 0)
		return errno;
	rights = CMSG_FIRSTHDR(&header);
	if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
		count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		memcpy(fds, CMSG_DATA(rights), count * sizeof(int));
	}
	if (got == sizeof(*message) && !(header.msg_flags & MSG_TRUNC) && count <= 1) {
		*fd = count ? fds[0] : -1;
		return 0;
	}
	while (count)
		close(fds[--count]);
	return got ? EPROTO : ECONNRESET;
}
