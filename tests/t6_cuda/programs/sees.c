/* SPDX-License-Identifier: Apache-2.0 */
/* sees [fork]: print the size of its GPUs by each possible way, as often as it is asked. */
#include <sys/wait.h>

#include "common.h"

typedef CUresult (*total_of)(size_t *bytes, CUdevice device);
typedef CUresult (*info_of)(size_t *free_bytes, size_t *total);

static void *found(const char *name)
{
	CUdriverProcAddressQueryResult status;
	void *function;

	DO(cuGetProcAddress_v2(name, &function, 12000, 0, &status));
	return function;
}

/* Print the MiB of each device, by linking and as the runtime finds it. */
static void totals(void)
{
	total_of other = (total_of)found("cuDeviceTotalMem");
	size_t total, same;
	int count;

	DO(cuDeviceGetCount(&count));
	for (int i = 0; i < count; i++) {
		DO(cuDeviceTotalMem_v2(&total, i));
		DO(other(&same, i));
		CHECK(total == same);
		tell("total", total >> 20);
	}
}

static void amounts(void)
{
	info_of other = (info_of)found("cuMemGetInfo");
	size_t total, free_bytes, same, alone;

	DO(cuMemGetInfo_v2(&free_bytes, &total));
	DO(other(&alone, &same));
	CHECK(total == same && free_bytes == alone && free_bytes <= total);
	DO(cuMemGetInfo_v2(&alone, NULL));
	CHECK(alone == free_bytes);
	DO(cuDeviceTotalMem_v2(&same, 0));
	CHECK(total == same);
	tell("total", total >> 20);
	tell("free", free_bytes >> 20);
}

static void *ask(void *total)
{
	DO(cuDeviceTotalMem_v2(total, 0));
	return NULL;
}

int main(int argc, char **argv)
{
	const char *way = argc > 1 ? argv[1] : "";
	CUdeviceptr address;
	size_t sizes[8];
	pthread_t threads[8];
	int status;

	DO(cuInit(0));
	if (!strcmp(way, "threads")) {
		for (int i = 0; i < 8; i++)
			CHECK(!pthread_create(&threads[i], NULL, ask, &sizes[i]));
		for (int i = 0; i < 8; i++)
			CHECK(!pthread_join(threads[i], NULL) && sizes[i] == sizes[0]);
		tell("total", sizes[0] >> 20);
		return 0;
	}
	totals();
	if (!strcmp(way, "fork")) {
		pid_t child = fork();

		if (!child) {
			EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceTotalMem_v2(sizes, 0));
			execl("/proc/self/exe", argv[0], NULL);
			_exit(1);
		}
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
		totals();
		return 0;
	}
	start(0);
	amounts();
	DO(cuMemAlloc_v2(&address, 16 << 20));
	amounts();
	amounts();
	DO(cuMemFree_v2(address));
	return 0;
}
