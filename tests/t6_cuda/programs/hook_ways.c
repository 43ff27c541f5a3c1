/* NO_LINK: finds libcuda itself, as programs with the CUDA runtime do. */
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hook_ways WAY [VERSION FLAGS [LIBRARY]]: look up each name of stdin in one of the possible ways; print the file in
 * which it was found, and the symbol that exports it: "name file symbol", or "name - -".
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

typedef void *(*finding)(void *handle, const char *name);
typedef void *(*finding_version)(void *handle, const char *name, const char *version);

/* Look up by libc's own function, found by a handle of libc. */
static void *of_libc(const char *function)
{
	void *libc = dlopen("libc.so.6", RTLD_NOW), *found = dlsym(libc, function);

	return found ? found : dlsym(dlopen("libdl.so.2", RTLD_NOW), function);
}

/* Look up from a library that finds others before the one that is preloaded (fake/deep). */
static void *deeply(const char *way, const char *library, const char *name, int version, cuuint64_t flags)
{
	void *deep = dlopen(library, RTLD_NOW | RTLD_DEEPBIND), *function;
	const char *which = strchr(way, '-') + 1;

	CHECK(deep);
	if (!strcmp(which, "twice")) {
		deep = ((void *(*)(const char *))dlsym(deep, "deep_open"))("libdeep-now.so");
		which = "linked";
	}
	function = dlsym(deep, !strcmp(which, "dlsym") || !strcmp(which, "nvml") ? "deep_dlsym" :
			       !strcmp(which, "dlvsym") ? "deep_dlvsym" :
			       !strcmp(which, "get") ? "deep_get" : "deep_linked");
	CHECK(function);
	if (!strcmp(which, "linked"))
		return ((void *(*)(const char *))function)(name);
	if (!strcmp(which, "get"))
		return ((void *(*)(const char *, int, cuuint64_t))function)(name, version, flags);
	return ((void *(*)(const char *, const char *))function)(
		strcmp(which, "nvml") ? "libcuda.so.1" : "libnvidia-ml.so.1", name);
}

int main(int argc, char **argv)
{
	const char *way = argv[1];
	int version = argc > 2 ? atoi(argv[2]) : 13000;
	cuuint64_t flags = argc > 3 ? strtoull(argv[3], NULL, 0) : 0;
	void *handle = strcmp(way, "absent") ?
			       dlopen("libcuda.so.1", RTLD_NOW | (strcmp(way, "handle") ? RTLD_GLOBAL : 0)) : NULL;
	CUresult (*v1)(const char *, void **, int, cuuint64_t) = NULL;
	CUresult (*v2)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *) = NULL;
	CUdriverProcAddressQueryResult status;
	char name[128];

	if (handle) {
		*(void **)&v1 = dlsym(handle, "cuGetProcAddress");
		*(void **)&v2 = dlsym(handle, "cuGetProcAddress_v2");
	}
	/* As cudart does it: the function that finds all others is itself looked up. */
	if (!strcmp(way, "cudart"))
		CHECK(!v2("cuGetProcAddress", (void **)&v2, version, flags, &status));
	while (scanf("%127s", name) == 1) {
		void *found = NULL;
		Dl_info info = { 0 };

		if (!strcmp(way, "handle"))
			found = dlsym(handle, name);
		else if (!strcmp(way, "default") || !strcmp(way, "absent"))
			found = dlsym(RTLD_DEFAULT, name);
		else if (!strcmp(way, "next"))
			found = dlsym(RTLD_NEXT, name);
		else if (!strcmp(way, "program"))
			found = dlsym(dlopen(NULL, RTLD_NOW), name);
		else if (!strcmp(way, "dlvsym"))
			found = dlvsym(handle, name, "GLIBC_2.2.5");
		else if (!strcmp(way, "libc-dlsym"))
			found = ((finding)of_libc("dlsym"))(handle, name);
		else if (!strcmp(way, "libc-dlvsym"))
			found = ((finding_version)of_libc("dlvsym"))(handle, name, "GLIBC_2.2.5");
		else if (!strncmp(way, "deep-", 5))
			found = deeply(way, argv[4], name, version, flags);
		else if (!strcmp(way, "v1"))
			CHECK(!v1(name, &found, version, flags) == (found != NULL));
		else
			CHECK(!v2(name, &found, version, flags, &status) == (found != NULL));
		CHECK(found || strcmp(way, "default") || dlerror());
		if (found && dladdr(found, &info) && info.dli_sname)
			printf("%s %s %s\n", name, strrchr(info.dli_fname, '/') + 1, info.dli_sname);
		else
			printf("%s - -\n", name);
	}
	return 0;
}
