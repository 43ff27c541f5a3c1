/* SPDX-License-Identifier: Apache-2.0 */
/* hook_faults NAME: call that entry point once, and print its answer. FAKE_FAIL makes it fail. */
#include "common.h"

static long zeros[512];

#include "hook_faults.inc"

int main(int argc, char **argv)
{
	(void)argc;
	start(0);
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
		if (!strcmp(calls[i].name, argv[1]))
			return printf("%d\n", (int)calls[i].call()) < 0;
	return 2;
}
