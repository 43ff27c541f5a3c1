// SPDX-License-Identifier: Apache-2.0
/*
 * Experiment: what the bus carries between memory of the host and of the GPU, both made by cuMemCreate as the library
 * makes them, in copies of one size each that take turns on one stream or more.
 *
 *     nvcc -O2 -o copies tests/experiments/copies.cu -lcuda && ./copies
 *
 * A line for each way, size in MiB and number of streams: GB/s, the best of TIMES.
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <cuda.h>

#define MIB ((size_t)1 << 20)
#define BYTES (4096 * MIB)	/* of each place */
#define TIMES 3
#define STREAMS 3

#define CHECK(call)                                                                                                    \
	do {                                                                                                           \
		const CUresult result_ = (call);                                                                       \
		if (result_ != CUDA_SUCCESS) {                                                                         \
			fprintf(stderr, "%s: error %d\n", #call, (int)result_);                                        \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static double now()
{
	timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Maps BYTES of a place, in chunks, at one range of addresses. */
static CUdeviceptr mapped(CUmemLocationType place, CUdevice device, size_t chunk)
{
	const CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, device }, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemAllocationProp prop = {};
	CUdeviceptr address;

	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location.type = place;
	prop.location.id = place == CU_MEM_LOCATION_TYPE_DEVICE ? device : 0;
	CHECK(cuMemAddressReserve(&address, BYTES, 0, 0, 0));
	for (size_t at = 0; at < BYTES; at += chunk) {
		CUmemGenericAllocationHandle memory;

		CHECK(cuMemCreate(&memory, chunk, &prop, 0));
		CHECK(cuMemMap(address + at, chunk, 0, memory, 0));
		CHECK(cuMemRelease(memory));
	}
	CHECK(cuMemSetAccess(address, BYTES, &access, 1));
	return address;
}

/* Returns the GB/s of one time. */
static double carried(CUdeviceptr to, CUdeviceptr from, size_t chunk, const CUstream *streams, int count)
{
	const double begun = now();
	int next = 0;

	for (size_t at = 0; at < BYTES; at += chunk) {
		CHECK(cuMemcpyDtoDAsync(to + at, from + at, chunk, streams[next]));
		next = (next + 1) % count;
	}
	for (int i = 0; i < count; i++)
		CHECK(cuStreamSynchronize(streams[i]));
	return (double)BYTES / (now() - begun) / 1e9;
}

int main()
{
	const size_t sizes[] = { 2 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB };
	CUstream streams[STREAMS];
	CUcontext context;
	CUdevice device;

	CHECK(cuInit(0));
	CHECK(cuDeviceGet(&device, 0));
	CHECK(cuDevicePrimaryCtxRetain(&context, device));
	CHECK(cuCtxSetCurrent(context));
	for (int i = 0; i < STREAMS; i++)
		CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
	for (size_t size : sizes) {
		const CUdeviceptr host = mapped(CU_MEM_LOCATION_TYPE_HOST_NUMA, device, size);
		const CUdeviceptr gpu = mapped(CU_MEM_LOCATION_TYPE_DEVICE, device, size);

		for (int count = 1; count <= STREAMS; count++) {
			double in = 0, out = 0;

			for (int i = 0; i < TIMES; i++) {
				const double came = carried(gpu, host, size, streams, count);
				const double went = carried(host, gpu, size, streams, count);

				in = came > in ? came : in;
				out = went > out ? went : out;
			}
			printf("%3zu MiB, %d streams: in %.1f, out %.1f\n", size / MIB, count, in, out);
		}
		CHECK(cuMemUnmap(host, BYTES));
		CHECK(cuMemAddressFree(host, BYTES));
		CHECK(cuMemUnmap(gpu, BYTES));
		CHECK(cuMemAddressFree(gpu, BYTES));
	}
	return 0;
}
