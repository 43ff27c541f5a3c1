// SPDX-License-Identifier: Apache-2.0
/* cuGetProcAddress: returns the newest variant that is no newer than what the caller was compiled for. */

#include "entry.h"

#include <string.h>

#include "internal.h"

static void *find(const char *symbol, int version, cuuint64_t flags, bool *too_old)
{
	const struct fake_entry *best = NULL;

	*too_old = false;
	for (const struct fake_entry *entry = fake_entries; entry->base; entry++) {
		if (strcmp(entry->base, symbol) ||
		    (entry->per_thread && !(flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)))
			continue;
		if (entry->since > version)
			*too_old = true;
		else if (!best || entry->per_thread > best->per_thread ||
			 (entry->per_thread == best->per_thread && entry->since > best->since))
			best = entry;
	}
	return best ? best->pointer : NULL;
}

FAKE_EXPORT cuGetProcAddress_v2(const char *symbol, void **pointer, int version, cuuint64_t flags,
				CUdriverProcAddressQueryResult *status)
{
	CUresult fault = fake_fault("cuGetProcAddress_v2");
	bool too_old;

	/* This works before cuInit. */
	if (fault && fault != CUDA_ERROR_NOT_INITIALIZED)
		return fault;
	if (!symbol || !pointer)
		return CUDA_ERROR_INVALID_VALUE;
	*pointer = find(symbol, version, flags, &too_old);
	/* A driver in which the two ways to a function give different pointers. The test only compares what comes
	 * back. */
	if (*pointer && fake_number("FAKE_ALIASES", 0))
		*pointer = (char *)*pointer + 1;
	if (status)
		*status = *pointer ? CU_GET_PROC_ADDRESS_SUCCESS :
			  too_old ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return *pointer ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Tables in the form of the real ones, which nothing documents: the first word of this one is its size. */
static const void *table_words[] = {
	(const void *)(5 * sizeof(void *)), (const void *)cuMemAlloc_v2, (const void *)fake_number, NULL,
	(const void *)cuLaunchKernel,
};
/* A table without its size, and one without a function that is caught. */
static const void *bare_words[] = { (const void *)cuMemAlloc_v2, (const void *)cuLaunchKernel };
static const void *strange_words[] = { (const void *)(2 * sizeof(void *)), (const void *)fake_number };

FAKE_EXPORT cuGetExportTable(const void **table, const CUuuid *id)
{
	if (!table || !id)
		return CUDA_ERROR_INVALID_VALUE;
	switch (id->bytes[0]) {
	case 1: *table = table_words; return CUDA_SUCCESS;
	case 2: *table = bare_words; return CUDA_SUCCESS;
	case 3: *table = strange_words; return CUDA_SUCCESS;
	}
	return CUDA_ERROR_NOT_FOUND;
}

FAKE_EXPORT cuGetProcAddress(const char *symbol, void **pointer, int version, cuuint64_t flags)
{
	return cuGetProcAddress_v2(symbol, pointer, version, flags, NULL);
}
