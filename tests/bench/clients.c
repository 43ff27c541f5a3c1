// SPDX-License-Identifier: Apache-2.0
/*
 * clients - N processes that read, or write, all files of a tree as fast as they are answered.
 *
 *   read    the whole tree, again and again: list every directory, and open, read and close every readable file
 *   write   a control of a random process, again and again: values that the process has room for
 *
 * usage: clients read|write N MOUNT
 * Prints "ready" once all are at work. At the end of its standard input it ends them and prints lines
 *   count C          calls, each an open, a read or write, and a close
 *   p50 US, p99 US, p999 US, worst US     duration of a call, microseconds (within 3 %)
 *   read(2) p99 US, or write(2) p99 US    the same for that system call alone
 *   error NAME COUNT for each errno met: no process comes or goes, so even a vanished one is an error
 * The processes die with it.
 */
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STEPS 32 /* of the histogram per doubling of the time */
#define BUCKETS (STEPS * 32)
#define ERRNOS 256
#define DEEPEST 8

struct times {
	uint64_t count[BUCKETS];
	uint64_t worst; /* ns */
};

struct results {
	struct times whole; /* open, the call, and close together */
	struct times call; /* read(2) or write(2) alone */
	uint64_t errors[ERRNOS];
};

static struct results *results; /* of this process */

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * UINT64_C(1000000000) + t.tv_nsec;
}

/* Return the bucket of a time: logarithmic from 256 ns on, 32 buckets per doubling. */
static unsigned int bucket(uint64_t ns)
{
	unsigned int power = ns < 256 ? 8 : 63 - __builtin_clzll(ns);
	uint64_t part = ns < 256 ? 0 : (ns >> (power - 5)) & (STEPS - 1);
	unsigned int index = (power - 8) * STEPS + part;

	return index < BUCKETS ? index : BUCKETS - 1;
}

static double bucket_us(unsigned int index)
{
	return (UINT64_C(1) << (index / STEPS + 8)) * (1 + (index % STEPS + 1.0) / STEPS) / 1e3;
}

static void took(struct times *times, uint64_t since)
{
	uint64_t ns = now() - since;

	times->count[bucket(ns)]++;
	if (ns > times->worst)
		times->worst = ns;
}

static void failed(int error)
{
	results->errors[error % ERRNOS]++;
}

static void read_file(int directory, const char *name)
{
	char buffer[8192];
	uint64_t start = now(), call;
	int fd = openat(directory, name, O_RDONLY | O_CLOEXEC);

	if (fd < 0) {
		failed(errno);
		return;
	}
	call = now();
	if (read(fd, buffer, sizeof(buffer)) < 0)
		failed(errno);
	took(&results->call, call);
	close(fd);
	took(&results->whole, start);
}

/* Return whether files of that name are readable, from a single check: one per file would be another request. */
static bool readable(int directory, const char *name)
{
	static struct known {
		char name[256]; /* NAME_MAX and a zero */
		bool readable;
	} known[64];
	struct stat st;

	for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
		if (!strcmp(known[i].name, name))
			return known[i].readable;
		if (known[i].name[0])
			continue;
		if (fstatat(directory, name, &st, AT_SYMLINK_NOFOLLOW)) {
			failed(errno);
			return false;
		}
		snprintf(known[i].name, sizeof(known[i].name), "%s", name);
		known[i].readable = st.st_mode & 0444 && strcmp(name, "usermemfd");
		return known[i].readable;
	}
	return true;
}

static void read_directory(int directory, int depth)
{
	struct dirent *entry;
	DIR *stream = fdopendir(directory);

	if (!stream) {
		failed(errno);
		close(directory);
		return;
	}
	while ((entry = readdir(stream))) {
		int fd;

		if (entry->d_name[0] == '.')
			continue;
		if (entry->d_type == DT_DIR && depth < DEEPEST) {
			fd = openat(dirfd(stream), entry->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
			if (fd < 0)
				failed(errno);
			else
				read_directory(fd, depth + 1);
		} else if (entry->d_type == DT_REG && readable(dirfd(stream), entry->d_name)) {
			read_file(dirfd(stream), entry->d_name);
		}
	}
	closedir(stream);
}

static void reader(const char *mount)
{
	for (;;) {
		int fd = open(mount, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

		if (fd < 0)
			err(1, "%s", mount);
		read_directory(fd, 0);
	}
}

/* The writes, one after another; the last ones restore the initial state. */
static const struct action {
	const char *file;
	const char *values[2];
} actions[] = {
	{ "compute.freeze", { "1", "0" } },
	{ "compute.timeslice", { "500us", "default" } },
	{ "compute.weight", { "700", "100" } },
	{ "compute.priority", { "3", "0" } },
	{ "gmem.limit.low", { "2M", "0" } },
	{ "gmem.limit.high", { "2M", "max" } },
	{ "gmem.limit.high", { "1G", "max" } },
	{ "gmem.peak", { "0", "0" } },
};

static void write_file(const char *path, const char *value)
{
	ssize_t length = strlen(value);
	uint64_t start = now(), call;
	int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);

	if (fd < 0) {
		failed(errno);
		return;
	}
	call = now();
	if (write(fd, value, length) != length)
		failed(errno);
	took(&results->call, call);
	close(fd);
	took(&results->whole, start);
}

static void writer(const char *mount, unsigned int seed)
{
	for (;;) {
		struct dirent **entries;
		int count = scandir(mount, &entries, NULL, NULL);

		if (count < 0)
			err(1, "%s", mount);
		for (int i = 0; i < 256 && count; i++) {
			const char *name = entries[rand_r(&seed) % count]->d_name;
			const struct action *action = &actions[rand_r(&seed) % (sizeof(actions) / sizeof(*actions))];
			char path[4096];

			if (!atoi(name))
				continue;
			snprintf(path, sizeof(path), "%s/%s/0/%s", mount, name, action->file);
			write_file(path, action->values[0]);
			write_file(path, action->values[1]);
		}
		for (int i = 0; i < count; i++)
			free(entries[i]);
		free(entries);
	}
}

static double percentile(const struct times *all, double part)
{
	uint64_t below = 0, total = 0;

	for (unsigned int i = 0; i < BUCKETS; i++)
		total += all->count[i];
	for (unsigned int i = 0; i < BUCKETS; i++) {
		below += all->count[i];
		if (below >= total * part)
			return bucket_us(i);
	}
	return bucket_us(BUCKETS - 1);
}

static uint64_t add(struct times *sum, const struct times *one)
{
	uint64_t count = 0;

	for (unsigned int i = 0; i < BUCKETS; i++) {
		sum->count[i] += one->count[i];
		count += one->count[i];
	}
	if (one->worst > sum->worst)
		sum->worst = one->worst;
	return count;
}

static void print_sum(const struct results *each, int n, const char *call)
{
	static struct results sum;
	uint64_t total = 0;

	for (int client = 0; client < n; client++) {
		total += add(&sum.whole, &each[client].whole);
		add(&sum.call, &each[client].call);
		for (int i = 0; i < ERRNOS; i++)
			sum.errors[i] += each[client].errors[i];
	}
	printf("count %llu\n", (unsigned long long)total);
	printf("p50 %.1f\np99 %.1f\np999 %.1f\n", percentile(&sum.whole, 0.5), percentile(&sum.whole, 0.99),
	       percentile(&sum.whole, 0.999));
	printf("worst %.1f\n%s(2) p99 %.1f\n", sum.whole.worst / 1e3, call, percentile(&sum.call, 0.99));
	for (int i = 0; i < ERRNOS; i++)
		if (sum.errors[i])
			printf("error %s %llu\n", strerrorname_np(i) ?: "?", (unsigned long long)sum.errors[i]);
}

int main(int argc, char **argv)
{
	int n = argc == 4 ? atoi(argv[2]) : 0, made, status, code = 0;
	struct results *all;
	pid_t self = getpid(), *pids;
	char sink[64];

	if (n < 1 || (strcmp(argv[1], "read") && strcmp(argv[1], "write")))
		errx(2, "usage: clients read|write N MOUNT");
	all = mmap(NULL, n * sizeof(*all), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pids = calloc(n, sizeof(*pids));
	if (all == MAP_FAILED || !pids)
		err(1, "memory");
	for (made = 0; made < n; made++) {
		pids[made] = fork();
		if (pids[made] < 0)
			err(1, "fork");
		if (!pids[made]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() != self)
				_exit(0);
			results = &all[made];
			if (!strcmp(argv[1], "read"))
				reader(argv[3]);
			else
				writer(argv[3], made + 1);
		}
	}
	puts("ready");
	fflush(stdout);
	while (read(STDIN_FILENO, sink, sizeof(sink)) > 0)
		;
	for (int i = 0; i < made; i++)
		kill(pids[i], SIGKILL);
	/* A process that ended by itself has printed why. */
	while (wait(&status) > 0)
		code |= !WIFSIGNALED(status);
	print_sum(all, n, argv[1]);
	return code;
}
