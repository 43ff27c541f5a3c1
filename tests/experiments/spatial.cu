// A program for the experiment on space within a slice: kernels of a chosen number of blocks, back to back, on as many
// SMs as its page asks for; beside them, if asked, copies in both directions and remaps of GPU memory.
//
//   spatial FILE KERNEL_US BLOCKS [plain|graph|blas]
//
// Each block of a kernel spins for KERNEL_US of its SM's clock and fills its SM (by shared memory), so a kernel of B
// blocks on S SMs takes ceil(B / S) rounds. FILE is 4096 bytes on tmpfs:
//   u64 finished  @0   kernels (graphs, products) completed, counted by the host as their events complete
//   u64 copied    @8   copies of 16 MiB in each direction completed
//   u64 remapped  @16  remaps of 64 MiB completed: to a chunk in the host and back, with the contents carried along
//   u64 changed_ns @24 what the last change of SMs took: from the request seen to the first kernel on the new SMs done
//   u32 want      @32  SMs asked for; 0 is all of them, without a green context
//   u32 has       @36  SMs of the green context in use; 0 without one
//   u32 stop      @40  1: end
//   u32 extra     @44  bit 0: copy, bit 1: remap
//   u32 ready     @48  1 once the first kernel is done
//   u32 wrong     @52  remaps after which the contents were not those of before
//   u32 first     @56  number of the first group of SMs that is used; behind the last one is group 0
//   u32 changes   @60  changes of SMs of which the first kernel is done
//   char error[128] @64  the first call that failed, with its code
//   u64s          @192  of the last change, nanoseconds: the split (once), the green context, its stream, what lies
//                       between that and the first launch there, and that launch; bytes of the GPU that all of it took
#include <cuda.h>
#include <cuda_runtime.h>
#ifdef BLAS
#include <cublas_v2.h>
#endif
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

constexpr int DEPTH = 8;			// kernels in flight
constexpr size_t COPY = 16 << 20;		// bytes of a copy
constexpr size_t CHUNK = 64 << 20;		// bytes of a remap
constexpr int SHARED = 160 << 10;		// bytes of shared memory of a block: one on an SM
constexpr int N = 4096;				// of the products

struct Page {
	volatile uint64_t finished, copied, remapped, changed_ns;
	volatile uint32_t want, has, stop, extra, ready, wrong;
	volatile uint32_t first, changes;
	char error[128];
	volatile uint64_t split_ns, green_ns, stream_ns, events_ns, launch_ns, took_bytes;
};
static_assert(offsetof(Page, error) == 64 && offsetof(Page, split_ns) == 192, "as spatial.py reads it");

static Page *page;

static void failed(const char *what, int code)
{
	if (!page->error[0])
		snprintf(page->error, sizeof page->error, "%s: %d", what, code);
}

#define TRY(call) do { int code_ = (int)(call); if (code_) { failed(#call, code_); _exit(1); } } while (0)

static uint64_t now()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

#ifdef __CUDACC__
__global__ void spin(long long cycles)
{
	extern __shared__ char filled[];
	long long ran = 0, last = clock64();
	filled[threadIdx.x] = 0;
	while (ran < cycles) {	// a step that is long is time off the SM
		long long at = clock64(), step = at - last;
		last = at;
		if (step < 4096)
			ran += step;
	}
}

static void kernel(int blocks, long long cycles, CUstream stream)
{
	spin<<<blocks, 128, SHARED, stream>>>(cycles);
	TRY(cudaGetLastError());
}
static void prepare() { TRY(cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED)); }
#else	/* a compiler of the host alone checks the rest */
static void kernel(int, long long, CUstream) {}
static void prepare() {}
#endif

// SMs of this program, in groups of the least size that the hardware supports.
struct Green {
	std::vector<CUdevResource> groups;
	unsigned each = 0;
	CUdevice device;

	void split(CUdevice on)
	{
		CUdevResource all, rest;
		unsigned count = 0;
		const uint64_t begun = now();
		device = on;
		TRY(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
		TRY(cuDevSmResourceSplitByCount(nullptr, &count, &all, &rest, 0, 8));
		groups.resize(count);
		TRY(cuDevSmResourceSplitByCount(groups.data(), &count, &all, &rest, 0, 8));
		each = groups[0].sm.smCount;
		page->split_ns = now() - begun;
	}

	// Take the groups from page->first on that together have `sms`, and make a stream on them.
	CUstream stream(unsigned sms, CUgreenCtx *context)
	{
		CUdevResourceDesc desc;
		CUstream stream;
		unsigned count = (sms + each - 1) / each;
		if (count > groups.size())
			count = groups.size();
		std::vector<CUdevResource> chosen;
		for (unsigned i = 0; i < count; i++)
			chosen.push_back(groups[(page->first + i) % groups.size()]);
		size_t before, after, total;
		TRY(cuMemGetInfo(&before, &total));
		uint64_t begun = now();
		TRY(cuDevResourceGenerateDesc(&desc, chosen.data(), count));
		TRY(cuGreenCtxCreate(context, desc, device, CU_GREEN_CTX_DEFAULT_STREAM));
		page->green_ns = now() - begun;
		begun = now();
		TRY(cuGreenCtxStreamCreate(&stream, *context, CU_STREAM_NON_BLOCKING, 0));
		page->stream_ns = now() - begun;
		TRY(cuMemGetInfo(&after, &total));
		page->took_bytes = before > after ? before - after : 0;
		page->has = count * each;
		return stream;
	}
};

// Events of one context: they are recorded in streams of that context alone (CUDA driver API, cuEventRecord).
struct Events {
	CUevent each[DEPTH + 1] = {};

	void make(CUcontext of)
	{
		TRY(cuCtxSetCurrent(of));
		for (CUevent &one : each)
			TRY(cuEventCreate(&one, CU_EVENT_DISABLE_TIMING));
	}
};

static void copies(CUcontext context)
{
	CUdeviceptr memory;
	CUstream streams[2];
	void *host;
	TRY(cuCtxSetCurrent(context));
	TRY(cuMemAlloc(&memory, 2 * COPY));
	TRY(cuMemHostAlloc(&host, 2 * COPY, 0));
	for (CUstream &one : streams)
		TRY(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
	while (!page->stop) {
		if (!(page->extra & 1)) {
			usleep(1000);
			continue;
		}
		TRY(cuMemcpyHtoDAsync(memory, host, COPY, streams[0]));
		TRY(cuMemcpyDtoHAsync((char *)host + COPY, memory + COPY, COPY, streams[1]));
		TRY(cuStreamSynchronize(streams[0]));
		TRY(cuStreamSynchronize(streams[1]));
		page->copied = page->copied + 1;
	}
}

static CUmemGenericAllocationHandle chunk(CUmemLocationType where, CUdevice device)
{
	CUmemAllocationProp prop = {};
	CUmemGenericAllocationHandle handle;
	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location.type = where;
	prop.location.id = where == CU_MEM_LOCATION_TYPE_DEVICE ? device : 0;
	TRY(cuMemCreate(&handle, CHUNK, &prop, 0));
	return handle;
}

static void map(CUdeviceptr at, CUmemGenericAllocationHandle handle, CUdevice device)
{
	CUmemAccessDesc access = {};
	access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.location.id = device;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	TRY(cuMemMap(at, CHUNK, 0, handle, 0));
	TRY(cuMemSetAccess(at, CHUNK, &access, 1));
}

// Remaps memory as the library does: the contents stay at the program's address, whatever backs it.
static void remaps(CUcontext context, CUdevice device)
{
	CUdeviceptr at, beside;
	CUstream stream;
	uint32_t seen = 0;
	TRY(cuCtxSetCurrent(context));
	TRY(cuMemAddressReserve(&at, CHUNK, 0, 0, 0));
	TRY(cuMemAddressReserve(&beside, CHUNK, 0, 0, 0));
	TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CUmemGenericAllocationHandle here = chunk(CU_MEM_LOCATION_TYPE_DEVICE, device);
	map(at, here, device);
	bool host = false;
	for (uint32_t n = 1; !page->stop;) {
		if (!(page->extra & 2)) {
			usleep(1000);
			continue;
		}
		TRY(cuMemsetD32Async(at, n, CHUNK / 4, stream));
		CUmemLocationType where = host ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST_NUMA;
		CUmemGenericAllocationHandle next = chunk(where, device);
		map(beside, next, device);
		TRY(cuMemcpyDtoDAsync(beside, at, CHUNK, stream));
		TRY(cuStreamSynchronize(stream));
		TRY(cuMemUnmap(at, CHUNK));
		TRY(cuMemUnmap(beside, CHUNK));
		TRY(cuMemRelease(here));
		map(at, next, device);
		here = next;
		host = !host;
		TRY(cuMemcpyDtoH(&seen, at + CHUNK - 4, 4));
		if (seen != n++)
			page->wrong = page->wrong + 1;
		page->remapped = page->remapped + 1;
	}
}

int main(int argc, char **argv)
{
	int fd = argc > 3 ? open(argv[1], O_RDWR) : -1;
	page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd < 0 || page == MAP_FAILED)
		return 2;
	const int blocks = atoi(argv[3]);
	const char *mode = argc > 4 ? argv[4] : "plain";
	int khz;
	CUdevice device;
	CUcontext context;
	TRY(cuInit(0));
	TRY(cudaSetDevice(0));
	TRY(cudaFree(nullptr));
	TRY(cuCtxGetDevice(&device));
	TRY(cuCtxGetCurrent(&context));
	TRY(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
	const long long cycles = (long long)(atof(argv[2]) * khz / 1000);
	prepare();

	CUstream plain, stream;
	CUgreenCtx green = nullptr;
	Green parts;
	TRY(cuStreamCreate(&plain, CU_STREAM_NON_BLOCKING));
	stream = plain;
	cudaGraphExec_t graph = nullptr;
	if (!strcmp(mode, "graph")) {
		cudaGraph_t captured;
		TRY(cudaStreamBeginCapture(plain, cudaStreamCaptureModeThreadLocal));
		kernel(blocks, cycles, plain);
		TRY(cudaStreamEndCapture(plain, &captured));
		TRY(cudaGraphInstantiate(&graph, captured, 0));
	}
#ifdef BLAS
	cublasHandle_t blas = nullptr;
	float *matrices[3] = {};
	if (!strcmp(mode, "blas")) {
		TRY(cublasCreate(&blas));
		for (float *&one : matrices)
			TRY(cudaMalloc(&one, N * (size_t)N * sizeof *one));
	}
#endif
	std::thread copying(copies, context), remapping(remaps, context, device);
	Events events;
	events.make(context);
	CUevent pending[DEPTH];
	uint64_t launched = 0, done = 0, since = 0, first = 0;
	uint32_t has = 0;
	while (!page->stop) {
		if (page->want != has) {
			since = now();
			has = page->want;
			// In order after what was launched on the former SMs.
			CUevent edge = events.each[DEPTH];
			TRY(cuEventRecord(edge, stream));
			CUcontext of = context;
			if (has) {
				if (parts.groups.empty())
					parts.split(device);
				stream = parts.stream(has, &green);
				TRY(cuCtxFromGreenCtx(&of, green));
			} else {
				stream = plain;
				page->has = 0;
			}
			const uint64_t made = now();
			TRY(cuStreamWaitEvent(stream, edge, 0));
			events = Events();
			events.make(of);
			TRY(cuCtxSetCurrent(context));
			first = launched + 1;
#ifdef BLAS
			if (blas)
				TRY(cublasSetStream(blas, stream));
#endif
			page->events_ns = now() - made;
		}
		const uint64_t begun = now();
		if (launched - done < DEPTH) {
			if (graph)
				TRY(cudaGraphLaunch(graph, stream));
#ifdef BLAS
			else if (blas) {
				const float one = 1, zero = 0;
				float **m = matrices;
				const cublasOperation_t op = CUBLAS_OP_N;
				TRY(cublasSgemm(blas, op, op, N, N, N, &one, m[0], N, m[1], N, &zero, m[2], N));
			}
#endif
			else
				kernel(blocks, cycles, stream);
			pending[launched % DEPTH] = events.each[launched % DEPTH];
			TRY(cuEventRecord(pending[launched++ % DEPTH], stream));
			if (launched == first)
				page->launch_ns = now() - begun;
			continue;
		}
		TRY(cuEventSynchronize(pending[done++ % DEPTH]));
		page->finished = done;
		page->ready = 1;
		if (since && done >= first) {
			page->changed_ns = now() - since;
			page->changes = page->changes + 1;
			since = 0;
		}
	}
	copying.join();
	remapping.join();
	return 0;
}
