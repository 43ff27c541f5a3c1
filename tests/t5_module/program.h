/* SPDX-License-Identifier: GPL-2.0 */
/* Shared by the C programs of the tests. */
#ifndef PROGRAM_H
#define PROGRAM_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../kmod/uapi/ggroup.h"

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;
typedef int32_t s32;

#define ARRAY_SIZE(a)	(sizeof(a) / sizeof(*(a)))
#define DEVICE		"/dev/ggroup"

/* Call an ioctl; return 0, or a negated errno. */
static inline int call(int fd, unsigned long cmd, void *arg)
{
	return ioctl(fd, cmd, arg) < 0 ? -errno : 0;
}

static inline u64 now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

__attribute__((noreturn, format(printf, 1, 2)))
static inline void die(const char *format, ...)
{
	int err = errno;
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fprintf(stderr, " (errno %d, %s)\n", err, strerror(err));
	exit(1);
}

static inline int open_device(int flags)
{
	int fd = open(DEVICE, O_RDWR | O_CLOEXEC | flags);

	if (fd < 0)
		die("cannot open %s", DEVICE);
	return fd;
}

/* Return field 22 of /proc/PID/stat; 0 if there is no such process. */
static inline u64 start_of(pid_t pid)
{
	char path[64], text[1024], *at;
	unsigned long long start = 0;
	ssize_t length;
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	length = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (length <= 0)
		return 0;
	text[length] = 0;
	at = strrchr(text, ')');
	if (!at || sscanf(at + 1, " %*c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
			  "%*s %*s %*s %llu", &start) != 1)
		return 0;
	return start;
}

/* xorshift64*: each thread has its own state, so a run is as repeatable as its threads are. */
static inline u64 next_random(u64 *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1dULL;
}

static inline u64 below(u64 *state, u64 limit)
{
	return next_random(state) % limit;
}

static inline u64 seed_of(u64 seed, u64 number)
{
	u64 state = (seed + 1) * 0x9e3779b97f4a7c15ULL ^ (number + 1) * 0xbf58476d1ce4e5b9ULL;

	next_random(&state);
	return state ?: 1;
}

/* Call ADD; return the id, or 0 with errno. */
static inline u64 add_slice(int fd, u64 root, u64 parent, const char *path)
{
	static __thread struct ggroup_group arg;

	memset(&arg, 0, sizeof(arg));
	arg.root = root;
	arg.parent = parent;
	arg.kind = GGROUP_KIND_SLICE;
	snprintf(arg.path, sizeof(arg.path), "%s", path);
	return ioctl(fd, GGROUP_IOC_ADD, &arg) ? 0 : arg.id;
}

static inline u64 add_process(int fd, u64 root, u64 parent, pid_t pid, u64 start)
{
	static __thread struct ggroup_group arg;

	memset(&arg, 0, sizeof(arg));
	arg.root = root;
	arg.parent = parent;
	arg.kind = GGROUP_KIND_PROCESS;
	arg.pid = pid;
	arg.start = start;
	return ioctl(fd, GGROUP_IOC_ADD, &arg) ? 0 : arg.id;
}

static inline int amount(int fd, unsigned long cmd, u64 id, u64 nbytes, u64 usec)
{
	struct ggroup_amount arg = { .id = id, .nbytes = nbytes, .usec = usec };

	return call(fd, cmd, &arg);
}

static inline int get_books(int fd, u64 id, struct ggroup_books *books)
{
	memset(books, 0, sizeof(*books));
	books->id = id;
	return call(fd, GGROUP_IOC_GET, books);
}

static inline u64 register_gpu(int fd, const char *uuid, u64 capacity, u64 granule, u64 headroom)
{
	struct ggroup_gpu arg = { .capacity = capacity, .granule = granule, .headroom = headroom };

	snprintf(arg.uuid, sizeof(arg.uuid), "%s", uuid);
	if (ioctl(fd, GGROUP_IOC_REGISTER, &arg))
		die("cannot register %s", uuid);
	return arg.root;
}

static inline int forget_gpu(int fd, const char *uuid)
{
	struct ggroup_gpu arg = { .capacity = 0 };

	snprintf(arg.uuid, sizeof(arg.uuid), "%s", uuid);
	return call(fd, GGROUP_IOC_FORGET, &arg);
}

static inline int join(int fd, const char *uuid, u32 timeout_ms, u64 *id)
{
	struct ggroup_join arg = { .timeout_ms = timeout_ms };
	int err;

	snprintf(arg.uuid, sizeof(arg.uuid), "%s", uuid);
	err = call(fd, GGROUP_IOC_JOIN, &arg);
	if (id)
		*id = arg.id;
	return err;
}

/* Fork a process that does nothing until it is killed, or its parent dies. */
static inline pid_t fork_idle(void)
{
	pid_t parent = getpid(), pid = fork();

	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(0);
	for (;;)
		pause();
}

static inline void end_process(pid_t pid)
{
	kill(pid, SIGKILL);
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
}

/*
 * Serve the provider @fd until woken by @stop: an arriving process gets a group below @parent, levers hold at once, and
 * nothing is ever reclaimed, since the accounts of the callers are exact.
 */
struct provider {
	int fd;
	int stop;
	u64 root;
	u64 parent;
	u64 served;
};

static inline void *serve(void *data)
{
	struct provider *provider = data;
	struct pollfd polled[2] = {
		{ .fd = provider->fd, .events = POLLIN },
		{ .fd = provider->stop, .events = POLLIN },
	};
	struct ggroup_message messages[16];

	while (poll(polled, 2, -1) >= 0 && !polled[1].revents) {
		ssize_t got = read(provider->fd, messages, sizeof(messages));

		for (size_t i = 0; got > 0 && i < got / sizeof(*messages); i++) {
			struct ggroup_message *message = &messages[i];

			if (message->op == GGROUP_OP_ARRIVE &&
			    !add_process(provider->fd, provider->root, provider->parent,
					 message->args[1], message->args[2]) && errno != EEXIST)
				message->status = -errno;
			message->op |= GGROUP_MESSAGE_REPLY;
			message->args[0] = 0;
			if (write(provider->fd, message, sizeof(*message)) < 0 && errno != EINVAL)
				die("cannot answer");
			provider->served++;
		}
	}
	return NULL;
}

#endif
