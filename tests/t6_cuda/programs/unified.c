/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unified WHAT: managed memory under limits, with a daemon that asks for it and lets it back. It says how many MiB of
 * it are on the GPU once a kernel has used all of it, and waits, as often as the test goes on; and checks that its own
 * advice is what it was, and its data.
 *
 * advice    with advice and prefetches of its own, which change meanwhile
 * plain     without
 * small     allocations of less than 2 MiB
 * free      what is in the host is freed
 */
#include "common.h"

void fake_managed_touch(CUdeviceptr address, size_t bytes, int device);
uint64_t fake_managed_on(CUdeviceptr address, size_t bytes, int device);

#define MIB ((size_t)1 << 20)
#define BYTES (96 * MIB + 4096)

static const CUmemLocation gpu = { .type = CU_MEM_LOCATION_TYPE_DEVICE };
static const CUmemLocation host = { .type = CU_MEM_LOCATION_TYPE_HOST };

static int attribute(CUmem_range_attribute which, CUdeviceptr address, size_t bytes)
{
	int value = -7;

	DO(cuMemRangeGetAttribute(&value, sizeof(value), which, address, bytes));
	return value;
}

static void by(CUdeviceptr address, size_t bytes, int first, int second)
{
	int found[3];

	DO(cuMemRangeGetAttribute(found, sizeof(found), CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, address, bytes));
	CHECK(found[0] == first && found[1] == second && found[2] == CU_DEVICE_INVALID);
}

/* The program's own advice, of three parts; `later`: what it was changed to. */
static void advised(CUdeviceptr address, bool later)
{
	const CUdeviceptr middle = address + 32 * MIB, end = address + 64 * MIB;
	CUmem_range_attribute two[] = { CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION };
	size_t sizes[] = { sizeof(int), sizeof(int) };
	int values[2];
	void *data[] = { &values[0], &values[1] };

	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, address, 32 * MIB) == 1);
	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, address, 33 * MIB) == 0);
	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, middle, 32 * MIB) == (later ? CU_DEVICE_CPU : 0));
	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, address, 4096) == CU_DEVICE_INVALID);
	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, middle, 32 * MIB) ==
	      (int)(later ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE));
	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, address, BYTES) ==
	      (int)CU_MEM_LOCATION_TYPE_INVALID);
	by(end, 4096, later ? CU_DEVICE_INVALID : CU_DEVICE_CPU, CU_DEVICE_INVALID);
	by(address, BYTES, CU_DEVICE_INVALID, CU_DEVICE_INVALID);
	by(middle + 5 * MIB, 4096, later ? 0 : CU_DEVICE_INVALID, CU_DEVICE_INVALID);
	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, end, 16 * MIB) == (later ? CU_DEVICE_CPU : 0));
	CHECK(attribute(CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, middle, 4096) == CU_DEVICE_INVALID);
	DO(cuMemRangeGetAttributes(data, sizes, two, 2, address, 32 * MIB));
	CHECK(values[0] == 1 && values[1] == CU_DEVICE_INVALID);
	EXPECT(CUDA_ERROR_INVALID_VALUE,
	       cuMemRangeGetAttribute(values, 2 * sizeof(int), CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, address, 4096));
	EXPECT(CUDA_ERROR_INVALID_VALUE,
	       cuMemRangeGetAttribute(values, 3, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, address, 4096));
}

static void advise(CUdeviceptr address)
{
	DO(cuMemAdvise_v2(address, 32 * MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, gpu));
	DO(cuMemAdvise_v2(address + 32 * MIB, 32 * MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, gpu));
	DO(cuMemAdvise(address + 64 * MIB + 1, 4095, CU_MEM_ADVISE_SET_ACCESSED_BY, CU_DEVICE_CPU));
	DO(cuMemPrefetchAsync_v2(address + 64 * MIB, 16 * MIB, gpu, 0, CU_STREAM_LEGACY));
}

/* What it changes while some is in the host. */
static void change(CUdeviceptr address)
{
	DO(cuMemAdvise(address + 32 * MIB, 32 * MIB, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU));
	DO(cuMemAdvise_v2(address + 64 * MIB, 4096, CU_MEM_ADVISE_UNSET_ACCESSED_BY, host));
	DO(cuMemAdvise(address + 37 * MIB, 4096, CU_MEM_ADVISE_SET_ACCESSED_BY, 0));
	DO(cuMemPrefetchAsync_ptsz(address + 64 * MIB, 16 * MIB, CU_DEVICE_CPU, 0));
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAdvise(address, 4096, (CUmem_advise)99, 0));
}

static void use(const char *what, CUdeviceptr address, bool is_advised)
{
	unsigned char *bytes = (unsigned char *)address;
	bool later = false;
	uint64_t on;

	for (size_t i = 0; i < BYTES; i += 4096)
		bytes[i] = (unsigned char)(i >> 12);
	if (is_advised)
		advise(address);
	for (;;) {
		fake_managed_touch(address, BYTES, 0);
		on = fake_managed_on(address, BYTES, 0);
		for (size_t i = 0; i < BYTES; i += 4096)
			CHECK(bytes[i] == (unsigned char)(i >> 12));
		if (is_advised)
			advised(address, later);
		tell(what, on / MIB);
		if (is_advised && !later) {
			change(address);
			later = true;
			advised(address, later);
		}
		if (!strcmp(what, "prefetched"))
			DO(cuMemPrefetchAsync_v2(address, BYTES, gpu, 0, CU_STREAM_LEGACY));
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "plain";
	CUdeviceptr address;

	start(0);
	if (!strcmp(what, "small")) {
		for (int i = 0; i < 64; i++)
			DO(cuMemAllocManaged(&address, MIB, CU_MEM_ATTACH_GLOBAL));
		tell("small", 64);
		DO(cuMemFree_v2(address));
		return 0;
	}
	DO(cuMemAllocManaged(&address, BYTES, CU_MEM_ATTACH_GLOBAL));
	if (strcmp(what, "free"))
		use(what, address, !strcmp(what, "advice"));
	tell("free", BYTES / MIB);
	DO(cuMemFree_v2(address));
	tell("free", 0);
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
	DO(cuMemAllocManaged(&address, BYTES, CU_MEM_ATTACH_GLOBAL));
	DO(cuDevicePrimaryCtxReset_v2(0));
	tell("free", 0);
	return 0;
}
