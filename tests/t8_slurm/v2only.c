// SPDX-License-Identifier: Apache-2.0
/*
 * v2only.so - preloaded into slurmd, which refuses to start where /proc/PID/cgroup has a line of cgroup v1, as in a
 * container on a hybrid host. It hides those lines: the file then has its line of cgroup v2 alone, as on other hosts.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LINES 16384	/* bytes of the file */

static int is_cgroup(const char *path)
{
	const size_t length = strlen(path), end = strlen("/cgroup");

	return !strncmp(path, "/proc/", 6) && length > end && !strcmp(path + length - end, "/cgroup");
}

static int filtered(int fd)
{
	char lines[LINES];
	const ssize_t count = read(fd, lines, sizeof(lines) - 1);
	char *line = lines;
	int copy;

	lines[count > 0 ? count : 0] = 0;
	while (line && strncmp(line, "0::", 3))
		line = strchr(line, '\n'), line = line ? line + 1 : NULL;
	close(fd);
	copy = memfd_create("cgroup", MFD_CLOEXEC);
	if (line && write(copy, line, strlen(line)) < 0)
		return -1;
	lseek(copy, 0, SEEK_SET);
	return copy;
}

static int opened(const char *name, const char *path, int flags, mode_t mode)
{
	int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
	const int fd = real(path, flags, mode);

	return fd >= 0 && is_cgroup(path) ? filtered(fd) : fd;
}

#define OPEN(name) \
int name(const char *path, int flags, ...) \
{ \
	va_list more; \
	va_start(more, flags); \
	const mode_t mode = va_arg(more, mode_t); \
	va_end(more); \
	return opened(#name, path, flags, mode); \
}

OPEN(open)
OPEN(open64)

static FILE *streamed(const char *name, const char *path, const char *mode)
{
	FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, name);

	if (!is_cgroup(path))
		return real(path, mode);
	const int fd = open(path, O_RDONLY | O_CLOEXEC);
	return fd < 0 ? NULL : fdopen(fd, mode);
}

FILE *fopen(const char *path, const char *mode)
{
	return streamed("fopen", path, mode);
}

FILE *fopen64(const char *path, const char *mode)
{
	return streamed("fopen64", path, mode);
}
