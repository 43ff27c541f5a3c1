/* NO_LINK */
/* SPDX-License-Identifier: Apache-2.0 */
/* For all other symbols dlsym works as without the library, and a program without CUDA gets nothing loaded or
 * started. */
#include <dirent.h>
#include <dlfcn.h>

#include "common.h"

/* A name of the driver that is this program's own: RTLD_DEFAULT finds it first. */
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
	*address = 42;
	(void)bytes;
	return CUDA_SUCCESS;
}

/* A wrapper as other interposers have it: RTLD_NEXT depends on the caller's place in the search order. */
void *malloc_of_libc(void)
{
	return dlsym(RTLD_NEXT, "malloc");
}

static int entries_in(const char *path)
{
	DIR *directory = opendir(path);
	int count = -2;

	CHECK(directory);
	while (readdir(directory))
		count++;
	closedir(directory);
	return count;
}

int main(void)
{
	void *libc = dlopen("libc.so.6", RTLD_NOW);
	Dl_info info;

	CHECK(libc);
	CHECK(dlsym(libc, "getppid") == dlsym(RTLD_DEFAULT, "getppid"));
	CHECK(dladdr(malloc_of_libc(), &info));
	CHECK(!dlsym(RTLD_DEFAULT, "no_such_symbol"));
	CHECK(dlerror() && !dlerror());
	CHECK(!dlsym(RTLD_DEFAULT, "cuLaunchKernel"));	/* libcuda is not loaded */
	CHECK(dlerror() && !dlerror());
	CHECK(!dlsym(RTLD_DEFAULT, "cuNoSuchThing"));
	CHECK(dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == (void *)cuMemAlloc_v2);
	CHECK(dlsym(RTLD_DEFAULT, "dlsym") != NULL);
	CHECK(!dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD));
	CHECK(entries_in("/proc/self/task") == 1);
	return 0;
}
