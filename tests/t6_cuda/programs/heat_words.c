/* SPDX-License-Identifier: Apache-2.0 */
/* LINK_LIBRARY: which words among the parameters of a launch are offered as pointers, and what tensor maps describe. */
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

/* A map alone, and one in a structure. */
struct tiles {
	uint64_t data;
	CUtensorMap map;	/* at offset 64 */
	uint64_t more;
};

KERNEL(mapped, 8, sizeof(CUtensorMap), sizeof(struct tiles))
{
	(void)parameters;
}

static uint64_t seen[64];
static size_t lengths[64];
static size_t count;

static void see(CUdeviceptr word, size_t bytes, void *argument)
{
	CHECK(argument == seen);
	CHECK(count < 64);
	lengths[count] = bytes;
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

static void encode(CUtensorMap *map, CUdeviceptr address, CUtensorMapDataType type, cuuint64_t columns, cuuint64_t rows,
		   cuuint64_t pitch)
{
	const cuuint64_t dim[] = { columns, rows }, strides[] = { pitch };
	const cuuint32_t box[] = { 1, 1 }, ones[] = { 1, 1 };

	DO(cuTensorMapEncodeTiled(map, type, 2, (void *)address, dim, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
				  CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
				  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

/* Checks that exactly these addresses and lengths were seen, in this order. */
static void saw_exactly(size_t n, const uint64_t addresses[], const size_t bytes[])
{
	CHECK(count == n);
	for (size_t i = 0; i < n; i++)
		CHECK(seen[i] == addresses[i] && lengths[i] == bytes[i]);
}

/* The bytes of a map tell nothing of its memory; only the call that encoded it does. */
static void maps(CUmodule module)
{
	struct tiles tiles;
	uint64_t pointer = 0x7000000000;
	CUdeviceptr address;
	CUtensorMap map, other;
	void *parameters[] = { &pointer, &map, &tiles };
	size_t bytes = sizeof(tiles);
	void *extra[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, &tiles, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
			  CU_LAUNCH_PARAM_END };
	CUfunction f;

	DO(cuMemAlloc_v2(&address, 16 << 20));
	DO(cuModuleGetFunction(&f, module, "mapped"));
	memset(&map, 0, sizeof(map));
	memset(&tiles, 0, sizeof(tiles));
	tiles.data = 0x7000800000;
	tiles.more = 0x7000900000;
	look(f, parameters, NULL);
	saw_exactly(3, (uint64_t[]){ pointer, tiles.data, tiles.more }, (size_t[]){ 0, 0, 0 });
	/* 64 rows of 1024 elements of 2 bytes, 4096 bytes apart. */
	encode(&map, address + 4096, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 1024, 64, 4096);
	encode(&tiles.map, address, CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B, 1024, 2, 1 << 20);
	look(f, parameters, NULL);
	saw_exactly(5, (uint64_t[]){ pointer, address + 4096, tiles.data, address, tiles.more },
		    (size_t[]){ 0, 63 * 4096 + 2048, 0, (1 << 20) + 512, 0 });
	look(f, NULL, extra);
	saw_exactly(3, (uint64_t[]){ tiles.data, address, tiles.more }, (size_t[]){ 0, (1 << 20) + 512, 0 });
	/* A changed map describes the same amount elsewhere. */
	DO(cuTensorMapReplaceAddress(&map, (void *)(address + (1 << 20))));
	look(f, parameters, NULL);
	CHECK(count == 5 && seen[1] == address + (1 << 20) && lengths[1] == 63 * 4096 + 2048);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuTensorMapReplaceAddress(NULL, (void *)address));
	/* No further than the end of the allocation; outside of the library's allocations the length is unknown. */
	encode(&map, address + (15 << 20), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1 << 20, UINT32_MAX, UINT64_C(1) << 39);
	look(f, parameters, NULL);
	CHECK(count == 5 && seen[1] == address + (15 << 20) && lengths[1] == 1 << 20);
	encode(&map, pointer, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1 << 10, 1 << 10, 1 << 12);
	look(f, parameters, NULL);
	CHECK(count == 5 && seen[1] == pointer && !lengths[1]);
	/* After very many maps the last ones are known. */
	for (int i = 0; i < 100000; i++) {
		CUtensorMap *one = i % 2 ? &map : &other;

		encode(one, address + (CUdeviceptr)i * 64, CU_TENSOR_MAP_DATA_TYPE_UINT8, 64, 1, 64);
		look(f, parameters, NULL);
		CHECK(count >= 4 && (!(i % 2) || (seen[1] == address + (CUdeviceptr)i * 64 && lengths[1] == 64)));
	}
	DO(cuMemFree_v2(address));
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
	/* With very many functions the table grows. */
	for (int i = 0; i < 1000; i++) {
		CUfunction other;

		DO(cuModuleGetFunction(&other, module, i % 2 ? "mixed" : "small"));
		look(other, i % 2 ? parameters : one, NULL);
		CHECK(count == (i % 2 ? 6 : 0));
	}
	/* While code is unloaded no layout is known, and afterwards the driver is asked again. */
	heat_code_goes();
	look(f, parameters, NULL);
	CHECK(!count);
	heat_code_gone();
	look(f, parameters, NULL);
	CHECK(count == 6);
	maps(module);
	DO(cuCtxSynchronize());
	return 0;
}
