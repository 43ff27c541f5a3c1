// A CUDA program that knows nothing of ggroupfs: it launches short kernels back to back, and the GPU itself counts
// them in a page that a test reads.
//
//   worker FILE KERNEL_US [BYTES]
//
// FILE (4096 bytes, on tmpfs) is mapped by both sides:
//   u64 finished[8]  @0    kernels completed in context n, stored by the GPU at the end of each kernel
//   u64 launched[8]  @64   kernels launched in context n
//   u32 error        @128  first CUDA error, 0 is none
//   u32 contexts     @132  contexts that run
//   u32 want         @136  written by the test: contexts that should run (1..8)
//   u32 stop         @140  written by the test: 1 drain and exit, 2 drain and stand idle, 0 run
//   u32 idle         @144  1 while drained and idle
//   u64 begun_ns     @152  CLOCK_MONOTONIC just before the first CUDA call
//   u64 created_ns   @160  CLOCK_MONOTONIC just after the first context was made
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

constexpr int CONTEXTS = 8;
constexpr unsigned long DEPTH = 32;  // kernels in flight in a context

struct Page {
	volatile uint64_t finished[CONTEXTS];
	volatile uint64_t launched[CONTEXTS];
	volatile uint32_t error, contexts, want, stop, idle, unused;
	volatile uint64_t begun_ns, created_ns;
};

// Count only cycles in which the kernel ran: a difference larger than a few instructions is time spent preempted.
__global__ void spin(unsigned *arrived, unsigned long long *total, volatile uint64_t *finished, long long cycles)
{
	long long ran = 0, last = clock64();
	while (ran < cycles) {
		long long now = clock64(), step = now - last;
		last = now;
		if (step < 4096)
			ran += step;
	}
	__syncthreads();
	if (threadIdx.x == 0 && atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1) {  // the last block
		*finished = ++*total;
		__threadfence_system();
	}
}

struct Context {
	CUcontext context;
	cudaStream_t stream;
	unsigned *arrived;
	unsigned long long *total;
	uint64_t *finished;
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

static uint64_t now()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void create(Context &c, int n)
{
	if (n == 0) {
		check(cudaSetDevice(0), "set device");
		check(cudaFree(nullptr), "primary context");
		page->created_ns = now();
		cuCtxGetCurrent(&c.context);
	} else {
		CUctxCreateParams params = {};
		CUdevice device;
		cuDeviceGet(&device, 0);
#if CUDA_VERSION >= 13000
		CUresult made = cuCtxCreate(&c.context, &params, 0, device);
#else
		(void)params;
		CUresult made = cuCtxCreate(&c.context, 0, device);
#endif
		if (made != CUDA_SUCCESS)
			check(cudaErrorUnknown, "create context");
	}
	cuCtxSetCurrent(c.context);
	check(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking), "stream");
	check(cudaMalloc(&c.arrived, sizeof *c.arrived), "allocate");
	check(cudaMalloc(&c.total, sizeof *c.total), "allocate");
	check(cudaMemset(c.arrived, 0, sizeof *c.arrived), "clear");
	check(cudaMemset(c.total, 0, sizeof *c.total), "clear");
	if (n == 0)
		check(cudaHostRegister(page, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable), "register");
	void *seen;
	check(cudaHostGetDevicePointer(&seen, page, 0), "device pointer");
	c.finished = (uint64_t *)&((Page *)seen)->finished[n];
}

int main(int argc, char **argv)
{
	if (argc < 3)
		return 2;
	int fd = open(argv[1], O_RDWR);
	page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd < 0 || page == MAP_FAILED)
		return 2;
	page->begun_ns = now();

	Context contexts[CONTEXTS];
	int count = 0, khz = 0, sms = 0;
	create(contexts[count++], 0);
	if (argc > 3) {
		void *memory;
		check(cudaMalloc(&memory, strtoull(argv[3], nullptr, 0)), "allocate");
	}
	cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0);
	cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
	long long cycles = (long long)(atof(argv[2]) * khz / 1000);
	page->contexts = count;

	while (page->stop != 1) {
		while (count < (int)page->want && count < CONTEXTS) {
			create(contexts[count], count);
			page->contexts = ++count;
		}
		bool launched = false;
		for (int n = 0; n < count && !page->stop; n++) {
			if (page->launched[n] - page->finished[n] >= DEPTH)
				continue;
			cuCtxSetCurrent(contexts[n].context);
			spin<<<sms, 128, 0, contexts[n].stream>>>(contexts[n].arrived, contexts[n].total,
								  contexts[n].finished, cycles);
			check(cudaGetLastError(), "launch");
			page->launched[n] = page->launched[n] + 1;
			launched = true;
		}
		if (page->stop == 2) {
			for (int n = 0; n < count; n++) {
				cuCtxSetCurrent(contexts[n].context);
				check(cudaStreamSynchronize(contexts[n].stream), "drain");
			}
			page->idle = 1;
			while (page->stop == 2)
				usleep(200);
			page->idle = 0;
		}
		if (!launched)
			usleep(50);
	}
	for (int n = 0; n < count; n++) {
		cuCtxSetCurrent(contexts[n].context);
		check(cudaStreamSynchronize(contexts[n].stream), "drain");
		check(cudaGetLastError(), "state");
	}
	return 0;
}
