/* SPDX-License-Identifier: Apache-2.0 */
/* One kernel. */
#include "common.h"

static int ran;

KERNEL(count, sizeof(int))
{
	__atomic_add_fetch(&ran, *(int *)parameters[0], __ATOMIC_RELAXED);
}

int main(void)
{
	int one = 1;
	void *parameters[] = { &one };

	start(0);
	DO(cuLaunchKernel(function("count"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	DO(cuCtxSynchronize());
	CHECK(ran == 1);
	return 0;
}
