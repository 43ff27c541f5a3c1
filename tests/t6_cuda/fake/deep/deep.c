// SPDX-License-Identifier: Apache-2.0
/*
 * A library that is loaded with RTLD_DEEPBIND: it finds libc, and libcuda to which it links, before what is preloaded.
 * Made twice: its functions are looked for at their first call, or at once (-z now).
 */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void *deep_dlsym(const char *library, const char *name)
{
	void *handle = dlopen(library, RTLD_NOW);

	return handle ? dlsym(handle, name) : NULL;
}

EXPORT void *deep_dlvsym(const char *library, const char *name)
{
	void *handle = dlopen(library, RTLD_NOW);

	return handle ? dlvsym(handle, name, "GLIBC_2.2.5") : NULL;
}

/* By the table of data: the address of each, which the loader fills in as the library is loaded. */
EXPORT void *deep_linked(const char *name)
{
#define ENTRY(entry, ...) \
	if (!strcmp(name, #entry)) \
		return (void *)entry;
#include "entries.def"
#undef ENTRY
	return NULL;
}

EXPORT void *deep_get(const char *name, int version, cuuint64_t flags)
{
	CUdriverProcAddressQueryResult status;
	void *found = NULL;

	return cuGetProcAddress_v2(name, &found, version, flags, &status) ? NULL : found;
}

/* By the table of functions. */
EXPORT size_t deep_total(void)
{
	size_t total;

	return cuInit(0) || cuDeviceTotalMem_v2(&total, 0) ? 0 : total;
}

/* Another library, by the dlopen that this one finds. */
EXPORT void *deep_open(const char *library)
{
	return dlopen(library, RTLD_NOW | RTLD_DEEPBIND);
}

/* What it has itself is its own. */
EXPORT CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count)
{
	(void)address;
	(void)value;
	(void)count;
	return CUDA_ERROR_UNKNOWN;
}

EXPORT int deep_own(void)
{
	return cuMemsetD8_v2(0, 0, 0);
}
