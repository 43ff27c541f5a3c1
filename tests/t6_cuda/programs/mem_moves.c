// SPDX-License-Identifier: Apache-2.0
/* mem_moves: memory of a program that knows nothing of ggroupfs moves out, is used there, and comes back; prints where
 * it is. */

#include "common.h"

#include <dlfcn.h>

#define BYTES (20 << 20)

KERNEL(add_one, sizeof(CUdeviceptr), sizeof(size_t));
void add_one(void **parameters)
{
	uint64_t *words = *(uint64_t **)parameters[0];

	for (size_t i = 0; i < *(size_t *)parameters[1]; i++)
		words[i]++;
}

static void say(const char *what, uint64_t number)
{
	char line[8];

	printf("%s %llu\n", what, (unsigned long long)number);
	fflush(stdout);
	CHECK(fgets(line, sizeof(line), stdin));
}

int main(void)
{
	void (*usage)(int, uint64_t *, uint64_t *, uint64_t *);
	uint64_t gpu, host, addresses, *data = malloc(BYTES);
	size_t count = BYTES / 8, total, unused;
	CUdeviceptr address, small;
	CUfunction kernel;

	start(0);
	usage = (void (*)(int, uint64_t *, uint64_t *, uint64_t *))dlsym(RTLD_DEFAULT, "fake_memory_usage");
	CHECK(usage && data);
	kernel = function("add_one");
	DO(cuMemAlloc_v2(&address, BYTES));
	DO(cuMemAlloc_v2(&small, 100));
	number(address, data, BYTES);
	number(small, data, 100);
	for (int round = 1; round <= 3; round++) {
		void *parameters[] = { &address, &count };

		DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
		DO(cuMemcpyDtoH_v2(data, address, BYTES));
		for (size_t i = 0; i < count; i++)
			CHECK(data[i] == i + (uint64_t)round);
		DO(cuMemcpyDtoH_v2(data, small, 100));
		for (uint64_t i = 0; i < 100 / 8; i++)
			CHECK(data[i] == i);
		usage(0, &gpu, &host, &addresses);
		say("gpu", gpu >> 20);
	}
	DO(cuMemGetInfo_v2(&unused, &total));
	say("total", total >> 20);
	DO(cuMemFree_v2(address));
	DO(cuMemFree_v2(small));
	free(data);
	return 0;
}
