// SPDX-License-Identifier: Apache-2.0
#include "lease.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fake.h"

struct lease {
	struct lease *next;
	int peer;
};

/* A byte with a descriptor. */
struct parcel {
	char byte;
	struct iovec part;
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	struct msghdr header;
};

static void wrap(struct parcel *parcel)
{
	memset(parcel, 0, sizeof(*parcel));
	parcel->part = (struct iovec){ &parcel->byte, 1 };
	parcel->header = (struct msghdr){ .msg_iov = &parcel->part, .msg_iovlen = 1, .msg_control = &parcel->control,
					  .msg_controllen = sizeof(parcel->control) };
}

int lease_make(struct lease **leases, int fd)
{
	struct lease *lease = malloc(sizeof(*lease));
	struct parcel parcel;
	struct cmsghdr *rights;
	int sockets[2];

	if (!lease || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets))
		fake_die("socketpair: %s", strerror(errno));
	wrap(&parcel);
	rights = CMSG_FIRSTHDR(&parcel.header);
	rights->cmsg_level = SOL_SOCKET;
	rights->cmsg_type = SCM_RIGHTS;
	rights->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(rights), &fd, sizeof(int));
	if (sendmsg(sockets[1], &parcel.header, 0) != 1)
		fake_die("sendmsg: %s", strerror(errno));
	*lease = (struct lease){ *leases, sockets[1] };
	*leases = lease;
	return sockets[0];
}

void lease_share(const struct lease *leases, struct lease **other)
{
	struct lease *lease = malloc(sizeof(*lease));

	if (!lease)
		fake_die("out of memory");
	*lease = (struct lease){ *other, fcntl(leases->peer, F_DUPFD_CLOEXEC, 3) };
	*other = lease;
}

void lease_move(struct lease **leases, struct lease **other)
{
	struct lease **end = other;

	while (*end)
		end = &(*end)->next;
	*end = *leases;
	*leases = NULL;
}

bool lease_any(struct lease **leases)
{
	for (struct lease *lease; (lease = *leases);) {
		struct pollfd peer = { .fd = lease->peer };

		if (!poll(&peer, 1, 0))
			return true;
		*leases = lease->next;
		close(lease->peer);
		free(lease);
	}
	return false;
}

int lease_open(int fd)
{
	struct parcel parcel;
	int memory;

	wrap(&parcel);
	if (recvmsg(fd, &parcel.header, MSG_PEEK | MSG_CMSG_CLOEXEC) != 1)
		return fcntl(fd, F_DUPFD_CLOEXEC, 3);
	memcpy(&memory, CMSG_DATA(CMSG_FIRSTHDR(&parcel.header)), sizeof(memory));
	return memory;
}
