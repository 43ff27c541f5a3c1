// A CUDA program that knows nothing of ggroupfs: its kernels have a chosen number of blocks, each of which fills an SM,
// and the GPU itself tells which SMs each kernel ran on, and whether it ran alone and in its place.
//
//     placed FILE BLOCK_US BLOCKS [KIND [DEPTH [STREAMS]]]
//
// A block spins for BLOCK_US of its SM's clock, so a kernel of B blocks takes ceil(B / S) times as long on S SMs. KIND
// is the stream: own, legacy, thread, or graph, where each launch is of a graph with one kernel. DEPTH kernels (4) are
// in flight, in STREAMS streams (1) by turns, of which each has its own count.
//
// FILE (SIZE bytes on tmpfs): kernels finished (u64 @0), launched (u64 @8), and those that ran beside another one of
// their stream, out of their turn, or not at all (u64 @16); stop (u32 @24, set by the test), error (u32 @28), fault
// (u32 @32, set by the test: write to an address that is none), SMs of the GPU (u32 @36), those of the last kernel, a
// bit each (u64s @40, @48, @56). Of kernel n, from 0 on: from 4096 on, in word n % 4096, SMs that it ran on, and
// (n + 1) << 16; 32768 bytes behind that, when it was seen to be done, nanoseconds of CLOCK_MONOTONIC.
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

static const uint64_t KEPT = 4096;    // kernels of which the page tells
static const int WORDS = 3;           // of a set of SMs
static const int SHARED = 160 << 10;  // bytes of a block: no second one has room on its SM
static const int MOST = 512;          // streams
static const uint64_t QUIET_NS = 500000000;

struct Page {
    volatile uint64_t finished, launched, wrong;
    volatile uint32_t stop, error, fault, sms;
    volatile uint64_t last[WORDS];
    char rest[4096 - 64];
    volatile uint64_t ran[KEPT], at[KEPT];
};
static_assert(offsetof(Page, ran) == 4096 && sizeof(Page) == 4096 + 2 * 8 * KEPT, "the test reads it");

// What the GPU stores in the host, of each stream.
struct Seen {
    volatile uint64_t finished, wrong;
};

// What is on the GPU, of each stream.
struct State {
    unsigned long long total, wrong, sms[WORDS];
    unsigned arrived, unused;
};

static Page *page;
static Seen *seen;

#include "words.cuh"

// A kernel is the `number`th of its stream, whose kernels are `step` apart among all. Of a graph the number is not
// known.
__global__ void occupy(State *state, Seen *told, Page *shown, uint64_t number, bool numbered, uint64_t first,
                       uint64_t step, long long cycles) {
    extern __shared__ char filled[];
    filled[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        unsigned sm;
        asm("mov.u32 %0, %%smid;" : "=r"(sm));
        atomicOr(&state->sms[sm / 64], 1ull << (sm % 64));
        if (numbered && blockIdx.x == 0 && *(volatile unsigned long long *)&state->total != number)
            atomicAdd(&state->wrong, 1ull);
    }
    long long ran = 0, last = clock64();
    while (ran < cycles) {  // a step that is long is time off the SM
        long long at = clock64(), spent = at - last;
        last = at;
        if (spent < 4096)
            ran += spent;
    }
    __syncthreads();
    __threadfence();
    if (threadIdx.x || atomicInc(&state->arrived, gridDim.x - 1) != gridDim.x - 1)
        return;
    const uint64_t kernel = first + state->total * step;
    int count = 0;
    for (int i = 0; i < WORDS; i++) {
        unsigned long long word = atomicExch(&state->sms[i], 0ull);
        count += __popcll(word);
        shown->last[i] = word;
    }
    shown->ran[kernel % KEPT] = (kernel + 1) << 16 | count;
    told->wrong = *(volatile unsigned long long *)&state->wrong;
    state->total++;
    __threadfence_system();
    told->finished = state->total;
}

__global__ void spoil(uint64_t *words) { words[threadIdx.x] = 1; }

static uint64_t nanoseconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// Notes when kernels are done, as the GPU says it: the thread that launches may wait in a call.
static void watch(int streams) {
    std::vector<uint64_t> known(streams);
    while (page->stop < 2) {
        uint64_t finished = 0, wrong = 0, now = nanoseconds();
        for (int i = 0; i < streams; i++) {
            for (uint64_t done = seen[i].finished; known[i] < done; known[i]++)
                page->at[(known[i] * streams + i) % KEPT] = now;
            finished += known[i];
            wrong += seen[i].wrong;
        }
        page->wrong = wrong;
        page->finished = finished;
        usleep(10);
    }
}

int main(int argc, char **argv) {
    if (argc < 4)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || page == MAP_FAILED)
        return 2;
    const int blocks = atoi(argv[3]), depth = argc > 5 ? atoi(argv[5]) : 4, streams = argc > 6 ? atoi(argv[6]) : 1;
    const char *kind = argc > 4 ? argv[4] : "own";
    if (streams < 1 || streams > MOST)
        return 2;
    int khz, sms;
    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    const long long cycles = (long long)(atof(argv[2]) * khz / 1000);
    CHECK(cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
    State *states;
    CHECK(cudaMalloc(&states, streams * sizeof *states));
    CHECK(cudaMemset(states, 0, streams * sizeof *states));
    CHECK(cudaHostAlloc(&seen, streams * sizeof *seen, cudaHostAllocMapped));
    memset((void *)seen, 0, streams * sizeof *seen);
    CHECK(cudaHostRegister(page, sizeof *page, cudaHostRegisterMapped));
    void *shown, *told;
    CHECK(cudaHostGetDevicePointer(&shown, page, 0));
    CHECK(cudaHostGetDevicePointer(&told, seen, 0));
    std::vector<cudaStream_t> each(streams);
    for (cudaStream_t &one : each) {
        one = !strcmp(kind, "legacy") ? cudaStreamLegacy : cudaStreamPerThread;
        if (strcmp(kind, "legacy") && strcmp(kind, "thread"))
            CHECK(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
    }
    const bool graphs = !strcmp(kind, "graph");
    std::vector<cudaGraphExec_t> made(streams);
    auto launch = [&](uint64_t number, cudaStream_t stream) {
        const int i = number % streams;
        occupy<<<blocks, 128, SHARED, stream>>>(states + i, (Seen *)told + i, (Page *)shown, number / streams, !graphs,
                                                (uint64_t)i, (uint64_t)streams, cycles);
        CHECK(cudaGetLastError());
    };
    for (int i = 0; graphs && i < streams; i++) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(each[i], cudaStreamCaptureModeThreadLocal));
        launch(i, each[i]);
        CHECK(cudaStreamEndCapture(each[i], &graph));
        CHECK(cudaGraphInstantiate(&made[i], graph, 0));
    }
    CHECK(cudaDeviceSynchronize());
    page->sms = sms;
    std::thread watching(watch, streams);
    uint64_t launched = 0, known = 0, since = nanoseconds();
    while (!page->stop) {
        if (page->finished != known) {
            known = page->finished;
            since = nanoseconds();
        } else if (nanoseconds() - since > QUIET_NS) {  // a context that is lost is known by a call alone
            cudaError_t state = cudaStreamQuery(each[0]);
            CHECK(state == cudaErrorNotReady ? cudaSuccess : state);
            since = nanoseconds();
        }
        if (page->fault) {
            spoil<<<1, 1, 0, each[0]>>>((uint64_t *)0x10);
            CHECK(cudaDeviceSynchronize());
        }
        if (launched - page->finished >= (uint64_t)depth) {
            usleep(10);
            continue;
        }
        if (graphs)
            CHECK(cudaGraphLaunch(made[launched % streams], each[launched % streams]));
        else
            launch(launched, each[launched % streams]);
        page->launched = ++launched;
    }
    CHECK(cudaDeviceSynchronize());
    page->stop = 2;
    watching.join();
    uint64_t finished = 0, wrong = 0;
    for (int i = 0; i < streams; i++) {
        finished += seen[i].finished;
        wrong += seen[i].wrong;
    }
    page->finished = finished;
    page->wrong = wrong + (launched > finished ? launched - finished : finished - launched);
    return page->wrong != 0;
}
