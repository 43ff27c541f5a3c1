/* SPDX-License-Identifier: Apache-2.0 */
/*
 * holder - a program of the software GPU that allocates memory and keeps it. Hundreds of them can start at once, where
 * each `ggroupfs tenant` would take seconds.
 *
 * usage: holder BYTES [MOUNTPOINT]
 * Prints "held" once it has its memory. If that is refused, prints an error and exits with status 1.
 */
#include <err.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* as in backend/door/wire.py */
enum { HELLO = 1, JOIN = 2, ALLOC = 32 };
#define REPLY (1u << 31)

struct message {
	uint32_t op;
	int32_t status;
	uint64_t seq;
	uint32_t gpu;
	uint32_t flags;
	uint64_t args[5];
};

static void find(const char *mount, struct sockaddr_un *address)
{
	char path[256], line[256];
	FILE *file;

	snprintf(path, sizeof(path), "%s/ggroup.backend", mount);
	file = fopen(path, "re");
	if (!file)
		err(1, "%s", path);
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, "socket %107s", address->sun_path) == 1)
			break;
	fclose(file);
}

static void ask(int fd, uint32_t op, uint64_t argument)
{
	static uint64_t seq;
	struct message message = { .op = op, .seq = ++seq, .args = { argument } };

	if (send(fd, &message, sizeof(message), MSG_NOSIGNAL) != sizeof(message))
		err(1, "send");
	do {
		if (recv(fd, &message, sizeof(message), 0) != sizeof(message))
			errx(1, "the software GPU is gone");
	} while (!(message.op & REPLY) || message.seq != seq);
	if (message.status) {
		errno = -message.status;
		err(1, "request %u", op);
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct message message;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (argc < 2)
		errx(2, "usage: holder BYTES [MOUNTPOINT]");
	find(argc > 2 ? argv[2] : "/run/ggroup", &address);
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)))
		err(1, "%s", address.sun_path);
	ask(fd, HELLO, 1);
	ask(fd, JOIN, 1);
	ask(fd, ALLOC, strtoull(argv[1], NULL, 0));
	puts("held");
	fflush(stdout);
	/* until the other end closes the connection */
	while (recv(fd, &message, sizeof(message), 0) > 0)
		;
	errx(1, "the software GPU is gone");
}
