// A CUDA program that serves requests of a fixed length as they arrive, or one that fills what others leave.
//
//     requests FILE serve SERVICE_US KERNELS [ROUNDS]
//     requests FILE fill KERNEL_US [ROUNDS]
//
// A request is KERNELS kernels, each of which uses all SMs. Together they take SERVICE_US on an otherwise idle GPU,
// which the program measures at its start. A request that comes while another is served waits, and that counts (open
// loop). A filler launches kernels of KERNEL_US as fast as they are done, a few of them ahead. ROUNDS is the length of
// a kernel as another process measured it: beside others, or on a part of the SMs, the program would measure fewer.
//
// FILE (SIZE bytes on tmpfs): requests or kernels done (u64 @0), 0 (u64 @16), stop (u32 @24, set by the test), error
// (u32 @28), number of the burst to serve (u32 @32, set by the test), of the last one that is over (u32 @36), its
// arrivals (u32 @40, set by the test), rounds of a kernel (u32 @44), nanoseconds that a request takes alone (u64 @48);
// from 4096 on, 8192 words each: arrivals in nanoseconds since the start, and latencies in nanoseconds.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t MOST = 8192;

struct Page {
    volatile uint64_t done, unused, wrong;
    volatile uint32_t stop, error, go, over, count, rounds;
    volatile uint64_t alone_ns;
    char rest[4096 - 56];
    volatile uint64_t arrival[MOST], latency[MOST];
};

static Page *page;

#include "words.cuh"

static const int AHEAD = 64; // kernels that a filler is ahead

__global__ void multiply(float *out, int rounds) {
    float a = threadIdx.x, b = 1.0001f;
    for (int i = 0; i < rounds; i++)
        a = a * b + 0.5f;
    if (a == 0.25f) // never; keeps the compiler from dropping the work
        *out = a;
}

static float *out;
static int blocks;

static void launch(int rounds) { multiply<<<blocks, 512>>>(out, rounds); }

// Return the rounds for which one kernel takes so many microseconds.
static int rounds_for(double us) {
    const int most = 200000;
    double best = 1e9;
    for (int i = 0; i < 20; i++) {
        double start = now();
        launch(most);
        CHECK(cudaDeviceSynchronize());
        best = now() - start < best ? now() - start : best;
    }
    return (int)(most * us / (best * 1e6)) + 1;
}

static void serve(int rounds, int kernels) {
    for (int i = 0; i < kernels; i++)
        launch(rounds);
    CHECK(cudaDeviceSynchronize());
    page->done = page->done + 1;
}

static void wait_until(double due) {
    for (double left; (left = due - now()) > 0;)
        if (left > 200e-6)
            usleep(100);
}

static void serve_all(int rounds, int kernels) {
    while (!page->stop) {
        if (page->go == page->over) {
            usleep(200);
            continue;
        }
        double start = now();
        const uint32_t count = page->count < MOST ? page->count : MOST;
        for (uint32_t i = 0; i < count && !page->stop; i++) {
            double due = start + page->arrival[i] / 1e9;
            wait_until(due);
            serve(rounds, kernels);
            page->latency[i] = (now() - due) * 1e9;
        }
        page->over = page->go;
    }
}

static void fill_all(int rounds) {
    cudaEvent_t events[2];
    for (cudaEvent_t &event : events) {
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        CHECK(cudaEventRecord(event));
    }
    for (int half = 0; !page->stop; half = !half) {
        for (int i = 0; i < AHEAD / 2; i++)
            launch(rounds);
        CHECK(cudaEventRecord(events[half]));
        CHECK(cudaEventSynchronize(events[!half]));
        page->done = page->done + AHEAD / 2;
    }
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    const bool serves = (argc == 5 || argc == 6) && !strcmp(argv[2], "serve");
    if (!serves && ((argc != 4 && argc != 5) || strcmp(argv[2], "fill")))
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    blocks = 4 * properties.multiProcessorCount;
    CHECK(cudaMalloc(&out, sizeof *out));
    const int kernels = serves ? atoi(argv[4]) : 1, given = argc == (serves ? 6 : 5) ? atoi(argv[argc - 1]) : 0;
    const int rounds = given ? given : rounds_for(atof(argv[3]) / kernels);
    page->rounds = rounds;
    if (!serves) {
        fill_all(rounds);
        return 0;
    }
    double best = 1e9;
    for (int i = 0; i < 50; i++) {
        double start = now();
        serve(rounds, kernels);
        best = now() - start < best ? now() - start : best;
    }
    page->alone_ns = best * 1e9;
    serve_all(rounds, kernels);
    return 0;
}
