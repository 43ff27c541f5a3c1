/* NO_LINK: finds libcuda itself, as programs with the CUDA runtime do. */
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hook_ways WAY [VERSION FLAGS]: look up each name of stdin in one of the possible ways; print the file in which it
 * was found, and the symbol that exports it: "name file symbol", or "name - -".
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

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
