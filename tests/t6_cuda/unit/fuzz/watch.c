// SPDX-License-Identifier: Apache-2.0
#include "watch.h"

#include <dirent.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "calls.h"
#include "double.h"

/* Seconds that a step may take: it takes milliseconds, but a machine may be busy, and a sanitizer slow. */
#define STEP_S 60
#define FRAMES 40
/* Microseconds that a thread gets to show its stack before the next one does. */
#define TURN_US 100000

static uint64_t step;	/* accessed atomically */

static void show_stack(int signal)
{
	void *frames[FRAMES];
	char line[64];
	const int length = snprintf(line, sizeof(line), "thread %d:\n", (int)syscall(SYS_gettid));

	(void)signal;
	(void)!write(STDERR_FILENO, line, (size_t)length);
	backtrace_symbols_fd(frames, backtrace(frames, FRAMES), STDERR_FILENO);
}

/* Show the stack if the program ends itself, as the double of the driver does at misuse. */
static void show_end(int signal)
{
	show_stack(signal);
	calls_say();
}

/* Show all stacks one by one, as they would overwrite each other. Threads that block all signals show none. */
static void show_all(void)
{
	DIR *directory = opendir("/proc/self/task");
	const struct dirent *entry;

	while (directory && (entry = readdir(directory))) {
		const int thread = atoi(entry->d_name);

		if (!thread)
			continue;
		syscall(SYS_tgkill, getpid(), thread, SIGUSR2);
		usleep(TURN_US);
	}
	fprintf(stderr, "in step %llu\n", (unsigned long long)__atomic_load_n(&step, __ATOMIC_RELAXED));
	abort();
}

/* Run as the thread that takes SIGQUIT, which all others block. */
static void *watch(void *argument)
{
	const char *text = getenv("UNIT_STEP_S");
	const int most = text ? atoi(text) : STEP_S;
	const struct timespec second = { .tv_sec = 1 };
	uint64_t before = 0;
	sigset_t quit;

	sigemptyset(&quit);
	sigaddset(&quit, SIGQUIT);
	for (int seconds = 0; seconds < most; seconds++) {
		const uint64_t now = __atomic_load_n(&step, __ATOMIC_RELAXED);

		if (sigtimedwait(&quit, NULL, &second) == SIGQUIT)
			break;
		if (now != before)
			seconds = -1;
		before = now;
	}
	show_all();
	return argument;
}

void watch_start(void)
{
	const struct sigaction action = { .sa_handler = show_stack, .sa_flags = SA_RESTART };
	const struct sigaction aborted = { .sa_handler = show_end, .sa_flags = (int)SA_RESETHAND };
	void *frames[FRAMES];
	pthread_t thread;
	sigset_t quit;

	backtrace(frames, FRAMES);	/* loads what it needs, which a signal handler may not do */
	sigemptyset(&quit);
	sigaddset(&quit, SIGQUIT);
	CHECK(!sigaction(SIGUSR2, &action, NULL) && !sigaction(SIGABRT, &aborted, NULL) &&
	      !pthread_sigmask(SIG_BLOCK, &quit, NULL));
	CHECK(!pthread_create(&thread, NULL, watch, NULL));
}

void watch_step(uint64_t number)
{
	__atomic_store_n(&step, number, __ATOMIC_RELAXED);
}
