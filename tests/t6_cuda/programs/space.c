/* SPDX-License-Identifier: Apache-2.0 */
/* space [fork]: print, as often as it is asked, where CUDA looks for its server. With `fork` a child does so first. */
#include <sys/wait.h>

#include "common.h"

static void look(void)
{
	const char *found;

	DO(cuInit(0));
	found = getenv("CUDA_MPS_PIPE_DIRECTORY");
	printf("pipe %s\n", found ? found : "none");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "fork")) {
		int status;
		const pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			look();
			return 0;
		}
		CHECK(waitpid(child, &status, 0) == child && !status);
	}
	do
		look();
	while (getchar() != EOF);
	return 0;
}
