// SPDX-License-Identifier: Apache-2.0
/*
 * processes - makes N real processes that do nothing, for the figures about big trees.
 *
 * usage: processes N
 * Prints their pids, one a line, then an empty line. At the end of its standard input it ends and reaps them all; they
 * also die with it, whatever ends it.
 */
#include <err.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static void child(pid_t parent)
{
	prctl(PR_SET_NAME, "bench-idle");
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent) /* the parent died before the line above */
		_exit(0);
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	int n = argc == 2 ? atoi(argv[1]) : 0, made, status = 0;
	pid_t *pids, self = getpid();
	char sink[64];

	if (n < 1)
		errx(2, "usage: processes N");
	pids = calloc(n, sizeof(*pids));
	if (!pids)
		err(1, "calloc");
	for (made = 0; made < n; made++) {
		pids[made] = fork();
		if (!pids[made])
			child(self);
		if (pids[made] < 0) {
			warn("fork of process %d", made + 1);
			status = 1;
			break;
		}
	}
	if (!status) {
		for (int i = 0; i < made; i++)
			printf("%d\n", pids[i]);
		puts("");
		fflush(stdout);
		while (read(STDIN_FILENO, sink, sizeof(sink)) > 0)
			;
	}
	for (int i = 0; i < made; i++)
		kill(pids[i], SIGKILL);
	while (wait(NULL) > 0)
		;
	free(pids);
	return status;
}
