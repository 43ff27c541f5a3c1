/* NO_LINK */
/* SPDX-License-Identifier: Apache-2.0 */
/* dlsym means for everything else what it means without us, and nothing is loaded or started for a program
 * without CUDA. */
#include <dirent.h>
#include <dlfcn.h>

#include "common.h"

/* A name of the driver that is this program's own: what RTLD_DEFAULT finds first. */
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
	*address = 42;
	(void)bytes;
	return CUDA_SUCCESS;
}

/* A wrapper of the kind that other interposers have: RTLD_NEXT is by the caller's place in the search order. */
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
