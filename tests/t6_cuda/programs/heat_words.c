/* SPDX-License-Identifier: Apache-2.0 */
/* LINK_LIBRARY: which words among the parameters of a launch are offered as pointers. */
#include "common.h"
#include "driver.h"
#include "heat.h"
#include "library.h"

struct view {
	uint32_t rank;
	uint32_t flags;
	uint64_t data;
	uint32_t extent[2];
	uint64_t more;
};

KERNEL(mixed, 4, 8, sizeof(struct view), 4, 8)
{
	(void)parameters;
}

KERNEL(small, 4)
{
	(void)parameters;
}

static uint64_t seen[64];
static size_t count;

static void see(CUdeviceptr word, void *argument)
{
	CHECK(argument == seen);
	CHECK(count < 64);
	seen[count++] = word;
}

static bool saw(uint64_t word)
{
	for (size_t i = 0; i < count; i++)
		if (seen[i] == word)
			return true;
	return false;
}

static void look(CUfunction f, void **parameters, void **extra)
{
	count = 0;
	heat_words(f, parameters, extra, see, seen);
}

int main(void)
{
	int number = 7;
	uint64_t pointer = 0x7000000000, last = 0x7000400000;
	struct view view = { 2, 1, 0x7000200000, { 3, 4 }, 0x7000300000 };
	void *parameters[] = { &number, &pointer, &view, &number, &last };
	void *one[] = { &number };
	uint64_t packed[3] = { 5, 0x7000500000, 0x7000600000 };
	size_t bytes = sizeof(packed);
	void *extra[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
			  CU_LAUNCH_PARAM_END };
	CUlibrary library;
	CUmodule module;
	CUkernel kernel;
	CUfunction f;

	start(0);
	library_begin();
	DO(cuModuleLoadData(&module, "image"));
	DO(cuModuleGetFunction(&f, module, "mixed"));
	for (int i = 0; i < 2; i++) {
		look(f, parameters, NULL);
		CHECK(saw(pointer) && saw(view.data) && saw(view.more) && saw(last));
		CHECK(count == 6); /* and rank with flags, and extent */
		look(f, NULL, extra);
		CHECK(saw(5) && saw(packed[1]) && saw(packed[2]) && count == 3);
		look(f, NULL, NULL);
		CHECK(!count);
	}
	/* A kernel of a library, launched as a function. */
	DO(cuLibraryLoadData(&library, "image", NULL, NULL, 0, NULL, NULL, 0));
	DO(cuLibraryGetKernel(&kernel, library, "mixed"));
	look((CUfunction)kernel, parameters, NULL);
	CHECK(count == 6);
	DO(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	/* Very many functions: the table grows. */
	for (int i = 0; i < 1000; i++) {
		CUfunction other;

		DO(cuModuleGetFunction(&other, module, i % 2 ? "mixed" : "small"));
		look(other, i % 2 ? parameters : one, NULL);
		CHECK(count == (i % 2 ? 6 : 0));
	}
	/* While code is unloaded nothing is known, and afterwards it is asked again. */
	heat_code_goes();
	look(f, parameters, NULL);
	CHECK(!count);
	heat_code_gone();
	look(f, parameters, NULL);
	CHECK(count == 6);
	DO(cuCtxSynchronize());
	return 0;
}
