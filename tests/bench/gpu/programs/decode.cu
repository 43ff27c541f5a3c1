// A CUDA program with the memory accesses of a language model that decodes: each step reads all of its memory once,
// layer by layer, and writes next to nothing.
//
//     decode FILE MIB [graph]
//
// FILE is a page on tmpfs: steps done (u64 @0), wrong words (u64 @16, all ones until the program is told to stop, then
// the number of sums that differ from those of all steps), stop (u32 @24, set by the caller), error (u32 @28).
//
// With `graph` a step is a CUDA graph of one kernel per layer; without, it is as many launches.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>

struct Page {
    volatile uint64_t passes, unused, wrong;
    volatile uint32_t stop, error;
};

static Page *page;

#include "words.cuh"

static const int LAYERS = 32, IN_FLIGHT = 2, BLOCKS = 1056, THREADS = 256;

// Adds all words of a layer to its sum.
__global__ void read_all(const ulonglong2 *words, size_t count, unsigned long long *sum) {
    __shared__ unsigned long long part;
    unsigned long long mine = 0;
    if (!threadIdx.x)
        part = 0;
    __syncthreads();
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        mine += words[i].x + words[i].y;
    for (int lane = 16; lane; lane /= 2)
        mine += __shfl_down_sync(~0u, mine, lane);
    if (!(threadIdx.x % 32))
        atomicAdd(&part, mine);
    __syncthreads();
    if (!threadIdx.x)
        atomicAdd(sum, part);
}

static uint64_t *layers[LAYERS];
static unsigned long long *sums;
static size_t words;

static void step(cudaStream_t stream) {
    for (int i = 0; i < LAYERS; i++)
        read_all<<<BLOCKS, THREADS, 0, stream>>>((const ulonglong2 *)layers[i], words / 2, sums + i);
    CHECK(cudaGetLastError());
}

// Returns the sum that one step adds for a layer whose first word has that number (words.cuh: fill).
static unsigned long long sum_of(uint64_t first) {
    return 0x9E3779B97F4A7C15ull * (first * words + words / 2 * (words - 1)); // the number of words is even
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    const int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    page->wrong = ~0ull;
    words = (strtoull(argv[2], nullptr, 10) << 20) / 8 / LAYERS / 2 * 2;
    const bool graph = argc > 3 && !strcmp(argv[3], "graph");
    cudaStream_t stream;
    cudaEvent_t events[IN_FLIGHT];
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&sums, LAYERS * sizeof *sums));
    CHECK(cudaMemsetAsync(sums, 0, LAYERS * sizeof *sums, stream));
    for (int i = 0; i < LAYERS; i++) {
        CHECK(cudaMalloc(&layers[i], words * 8));
        fill<<<BLOCKS, THREADS, 0, stream>>>(layers[i], words, i * words);
        CHECK(cudaGetLastError());
    }
    for (cudaEvent_t &event : events)
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    CHECK(cudaStreamSynchronize(stream));
    cudaGraphExec_t replayed = nullptr;
    if (graph) {
        cudaGraph_t captured;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        step(stream);
        CHECK(cudaStreamEndCapture(stream, &captured));
        CHECK(cudaGraphInstantiate(&replayed, captured, 0));
        CHECK(cudaGraphDestroy(captured));
    }
    uint64_t launched = 0;
    while (!page->stop) {
        if (launched - page->passes >= IN_FLIGHT) {
            CHECK(cudaEventSynchronize(events[launched % IN_FLIGHT]));
            page->passes = page->passes + 1;
        }
        if (graph)
            CHECK(cudaGraphLaunch(replayed, stream));
        else
            step(stream);
        CHECK(cudaEventRecord(events[launched % IN_FLIGHT], stream));
        launched++;
    }
    CHECK(cudaStreamSynchronize(stream));
    unsigned long long found[LAYERS];
    uint64_t wrong = 0;
    CHECK(cudaMemcpy(found, sums, sizeof found, cudaMemcpyDefault));
    for (int i = 0; i < LAYERS; i++)
        wrong += found[i] != launched * sum_of(i * words);
    page->wrong = wrong;
    return wrong != 0;
}
