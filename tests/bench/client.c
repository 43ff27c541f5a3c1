// SPDX-License-Identifier: Apache-2.0
/*
 * client - times, from outside and one at a time, what users do to a control file.
 *
 *   pread   pread(4096) at 0 on an open file                   READ
 *   cat     open, one read, close                              OPEN READ RELEASE
 *   stat    stat of the path                                   nothing while attributes are cached
 *   pwrite  pwrite of VALUE at 0 on an open file               WRITE
 *   echo    open with O_TRUNC, write VALUE, close              OPEN WRITE RELEASE
 *   other   as pwrite, VALUE and VALUE less one byte in turn   WRITE
 *   list    all of the directory FILE                          OPENDIR READDIRPLUS* RELEASEDIR
 *
 * usage: client FILE VALUE N OPERATION...
 * Prints a line "OPERATION p50 p99 min CPU" in microseconds for each; CPU is the client's own time per call. The first
 * N/10 + 1 calls count only for that. Everything works on any file system. A failing call ends it with status 1.
 */
#include <dirent.h>
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *path, *payload;
static char buf[4096];

static int open_file(int flags)
{
	int fd = open(path, flags | O_CLOEXEC);

	if (fd < 0)
		err(1, "open %s", path);
	return fd;
}

static void close_file(int fd)
{
	if (close(fd))
		err(1, "close %s", path);
}

static void do_pread(int fd)
{
	if (pread(fd, buf, sizeof(buf), 0) <= 0)
		err(1, "pread %s", path);
}

static void do_cat(int fd)
{
	fd = open_file(O_RDONLY);
	if (read(fd, buf, sizeof(buf)) <= 0)
		err(1, "read %s", path);
	close_file(fd);
}

static void do_stat(int fd)
{
	struct stat st;

	(void)fd;
	if (stat(path, &st))
		err(1, "stat %s", path);
}

static void do_pwrite(int fd)
{
	ssize_t length = strlen(payload);

	if (pwrite(fd, payload, length, 0) != length)
		err(1, "pwrite %s", path);
}

static void do_echo(int fd)
{
	fd = open_file(O_WRONLY | O_TRUNC);
	do_pwrite(fd);
	close_file(fd);
}

static void do_other(int fd)
{
	static int odd;
	ssize_t length = strlen(payload) - (odd = !odd);

	if (pwrite(fd, payload, length, 0) != length)
		err(1, "pwrite %s", path);
}

static void do_list(int fd)
{
	DIR *directory = opendir(path);
	int names = 0;

	(void)fd;
	if (!directory)
		err(1, "opendir %s", path);
	while (readdir(directory))
		names++;
	closedir(directory);
	if (!names)
		errx(1, "%s has no names", path);
}

static const struct operation {
	const char *name;
	int flags; /* how to open the file that stays open, -1 for none */
	void (*run)(int fd);
} operations[] = {
	{ "pread", O_RDONLY, do_pread }, { "cat", -1, do_cat },	  { "stat", -1, do_stat },
	{ "pwrite", O_WRONLY, do_pwrite }, { "echo", -1, do_echo },   { "other", O_WRONLY, do_other },
	{ "list", -1, do_list },
};

static const struct operation *find(const char *name)
{
	for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++)
		if (!strcmp(operations[i].name, name))
			return &operations[i];
	errx(2, "no operation %s", name);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void measure(const struct operation *op, double *times, int n)
{
	int fd = op->flags < 0 ? -1 : open_file(op->flags);
	struct timespec begun, used;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begun);
	for (int i = -(n / 10 + 1); i < n; i++) {
		double start = now();

		op->run(fd);
		if (i >= 0)
			times[i] = now() - start;
	}
	if (fd >= 0)
		close_file(fd);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	qsort(times, n, sizeof(*times), compare);
	printf("%s %.3f %.3f %.3f %.3f\n", op->name, times[n / 2], times[n * 99 / 100], times[0],
	       ((used.tv_sec - begun.tv_sec) * 1e6 + (used.tv_nsec - begun.tv_nsec) / 1e3) / (n + n / 10 + 1));
}

int main(int argc, char **argv)
{
	int n = argc > 4 ? atoi(argv[3]) : 0;
	double *times;

	if (n < 1)
		errx(2, "usage: client FILE VALUE N OPERATION...");
	path = argv[1];
	payload = argv[2];
	times = calloc(n, sizeof(*times));
	if (!times)
		err(1, "calloc");
	for (int i = 4; i < argc; i++)
		measure(find(argv[i]), times, n);
	free(times);
	return 0;
}
