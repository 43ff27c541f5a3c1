/* SPDX-License-Identifier: Apache-2.0 */
/* hook_fork before|after|exec */
#include <sys/wait.h>

#include "common.h"

static int ran;

KERNEL(count, sizeof(int))
{
	__atomic_add_fetch(&ran, *(int *)parameters[0], __ATOMIC_RELAXED);
}

static void use(void)
{
	int one = 1;
	void *parameters[] = { &one };
	CUdeviceptr address;

	start(0);
	DO(cuLaunchKernel(function("count"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	DO(cuMemAlloc_v2(&address, 4 << 20));
	DO(cuCtxSynchronize());
	DO(cuMemFree_v2(address));
	CHECK(ran == 1);
}

static void wait_for(pid_t child)
{
	int status;

	CHECK(child > 0);
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void *launch(void *stop)
{
	CUfunction f = function("count");
	int one = 1;
	void *parameters[] = { &one };

	while (!__atomic_load_n((bool *)stop, __ATOMIC_ACQUIRE))
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	DO(cuCtxSynchronize());
	return NULL;
}

static CUcontext context;

static void *launch_in(void *stop)
{
	DO(cuCtxSetCurrent(context));
	return launch(stop);
}

int main(int argc, char **argv)
{
	bool stop = false;
	pthread_t thread;
	pid_t child;

	(void)argc;
	if (!strcmp(argv[1], "child"))
		return use(), 0;
	if (!strcmp(argv[1], "before")) {
		child = fork();
		use();
		if (!child)
			_exit(0);
		wait_for(child);
		return 0;
	}
	/* At every fork another thread is in the middle of a launch. */
	context = start(0);
	CHECK(!pthread_create(&thread, NULL, launch_in, &stop));
	for (int i = 0; i < 20; i++) {
		child = fork();
		if (!child && !strcmp(argv[1], "exec")) {
			execl("/proc/self/exe", argv[0], "child", NULL);
			_exit(1);
		}
		if (!child) {
			CUdeviceptr address;
			CUcontext other;
			int count;

			EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&count));
			EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCtxCreate_v2(&other, 0, 0));
			CHECK(cuMemAlloc_v2(&address, 4096) != CUDA_SUCCESS);
			CHECK(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) != CUDA_SUCCESS);
			_exit(0);
		}
		wait_for(child);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELEASE);
	pthread_join(thread, NULL);
	return 0;
}
