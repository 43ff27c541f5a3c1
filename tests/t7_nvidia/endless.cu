// endless - a CUDA program that knows nothing of ggroupfs, with one kernel that runs until it is told to end.
//
//   endless FILE
//
// FILE (a page on tmpfs), as of elastic.cu: milliseconds that the kernel ran (u64 @0, stored by the GPU), words wrong
// (u64 @16: none), stop (u32 @24, set by the test), error (u32 @28).
#include <cstdint>
#include <cstdio>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cuda_runtime.h>

struct Page {
	volatile uint64_t ran, unused, wrong;
	volatile uint32_t stop, error;
};

static Page *page;

static void check(cudaError_t error, const char *what)
{
	if (error == cudaSuccess)
		return;
	page->error = error;
	fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
	_exit(1);
}

// Count only cycles in which the kernel ran: a difference larger than a few instructions is time spent preempted. One
// thread reads over the bus whether to end: with a warp of every block, a read took longer than that.
__global__ void persist(Page *page, volatile unsigned *over, long long millisecond)
{
	bool first = blockIdx.x == 0 && threadIdx.x == 0;
	long long ran = 0, last = clock64();

	while (!*over) {
		long long now = clock64(), step = now - last;

		last = now;
		if (step < 65536)  // a read over the bus takes less
			ran += step;
		if (!first)
			continue;
		if (ran >= millisecond) {
			ran -= millisecond;
			page->ran = page->ran + 1;
			__threadfence_system();
		}
		if (page->stop)
			*over = 1;
	}
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	int fd = open(argv[1], O_RDWR);
	page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd < 0 || page == MAP_FAILED)
		return 2;
	int khz = 0, sms = 0;
	unsigned *over;
	void *seen, *memory;
	check(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "clock");
	check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "processors");
	check(cudaMalloc(&memory, 1ull << 30), "allocate");
	check(cudaMalloc(&over, sizeof *over), "allocate");
	check(cudaMemset(over, 0, sizeof *over), "clear");
	check(cudaHostRegister(page, 4096, cudaHostRegisterMapped), "register");
	check(cudaHostGetDevicePointer(&seen, page, 0), "device pointer");
	persist<<<sms, 128>>>((Page *)seen, over, khz);
	check(cudaGetLastError(), "launch");
	check(cudaDeviceSynchronize(), "end");
	return 0;
}
