/* NO_LINK: finds libcuda itself. */
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hook_escapes: ways past the library that are none, and what keeps its meaning. hook_escapes deep LIBRARY: how large a
 * GPU looks to a library that is loaded with RTLD_DEEPBIND.
 */
#include <dlfcn.h>

#include "common.h"

typedef CUresult (*exporting)(const void **table, const CUuuid *id);

static const char *file_of(const void *pointer)
{
	Dl_info info;

	CHECK(pointer && dladdr(pointer, &info));
	return strrchr(info.dli_fname, '/') ? strrchr(info.dli_fname, '/') + 1 : info.dli_fname;
}

static bool is_ours(const void *pointer)
{
	return !strcmp(file_of(pointer), "libggroup-cuda.so");
}

static const void *const *table(exporting get, char number)
{
	const void *found = NULL, *again = NULL;
	CUuuid id = { { number } };

	DO(get(&found, &id));
	DO(get(&again, &id));
	CHECK(found == again);
	return found;
}

static void tables(void *libcuda)
{
	exporting get = (exporting)dlsym(libcuda, "cuGetExportTable");
	const void *const *words;
	CUuuid none = { { 9 } };
	const void *left = &none;

	CHECK(is_ours((const void *)get));
	words = table(get, 1);
	CHECK((size_t)words[0] == 5 * sizeof(void *) && is_ours(words[1]) && !is_ours(words[2]) && !words[3] &&
	      is_ours(words[4]));
	words = table(get, 2);	/* one without its size is left as it is */
	CHECK(!is_ours(words[0]) && !is_ours(words[1]) && !is_ours(words));
	words = table(get, 3);	/* and one that has nothing that is caught */
	CHECK(!strcmp(file_of(words), "libcuda.so.1"));
	EXPECT(CUDA_ERROR_NOT_FOUND, get(&left, &none));
	CHECK(left == &none);
	EXPECT(CUDA_ERROR_INVALID_VALUE, get(NULL, &none));
}

/* What is no business of ours is what it would be without us. */
static void others(void)
{
	void *libc = dlopen("libc.so.6", RTLD_NOW), *deep;

	CHECK(dlvsym(libc, "malloc", "GLIBC_2.2.5") && !is_ours(dlvsym(libc, "malloc", "GLIBC_2.2.5")));
	CHECK(!dlvsym(libc, "malloc", "GLIBC_1.0") && dlerror());
	CHECK(!dlvsym(RTLD_DEFAULT, "dlopen_of_nobody", "GLIBC_2.2.5") && dlerror());
	CHECK(is_ours(dlsym(libc, "dlsym")) && is_ours(dlsym(libc, "dlopen")) &&
	      is_ours(dlvsym(libc, "dlvsym", "GLIBC_2.2.5")));
	CHECK(!dlopen("/there/is/no.so", RTLD_NOW | RTLD_DEEPBIND) && strstr(dlerror(), "/there/is/no.so"));
	CHECK(!dlopen("no-such.so", RTLD_NOW) && strstr(dlerror(), "no-such.so"));
	CHECK(dlopen(NULL, RTLD_NOW | RTLD_DEEPBIND) == dlopen(NULL, RTLD_NOW));
	deep = dlopen("libdeep.so", RTLD_NOW | RTLD_DEEPBIND);
	CHECK(deep && deep == dlopen("libdeep.so", RTLD_LAZY));
	CHECK(((int (*)(void))dlsym(deep, "deep_own"))() == CUDA_ERROR_UNKNOWN);	/* it has that itself */
}

int main(int argc, char **argv)
{
	void *libcuda, *deep;

	if (argc > 2) {
		deep = dlopen(argv[2], RTLD_LAZY | RTLD_DEEPBIND);
		CHECK(deep);
		printf("%zu\n", ((size_t (*)(void))dlsym(deep, "deep_total"))() >> 20);
		return 0;
	}
	libcuda = dlopen("libcuda.so.1", RTLD_NOW);
	CHECK(libcuda);
	tables(libcuda);
	others();
	return 0;
}
