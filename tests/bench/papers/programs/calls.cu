// What calls of CUDA take: the medians of Flyt's table 5.
//
//     calls FILE
//
// FILE (a page on tmpfs): ready (u64 @8), stop (u32 @24, set by the caller), error (u32 @28), and the medians of COUNT
// calls, nanoseconds: cudaMemcpy of 4 MiB to the GPU (u64 @40) and to the host (@48), both with pinned memory, the
// launch of an empty kernel (@56) and cudaGetDeviceCount (@64). It ends once it is told to.

#include <algorithm>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vector>

struct Page {
    volatile uint64_t passes, ready, wrong;
    volatile uint32_t stop, error;
    volatile uint64_t unused, in, out, launch, count;
};

static Page *page;

static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return;
    page->error = error;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    _exit(1);
}
#define CHECK(call) check(call, #call)

static const int COUNT = 2000, WARM = 100;
static const size_t BYTES = 4 << 20;

__global__ void empty() {}

static uint64_t now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000ull + at.tv_nsec;
}

// The launch is timed by itself; the kernel is waited for outside.
template <typename Call> static uint64_t median(Call call, bool wait) {
    std::vector<uint64_t> found;
    for (int i = 0; i < WARM + COUNT; i++) {
        const uint64_t begin = now();
        call();
        const uint64_t end = now();
        if (wait)
            CHECK(cudaDeviceSynchronize());
        if (i >= WARM)
            found.push_back(end - begin);
    }
    std::nth_element(found.begin(), found.begin() + found.size() / 2, found.end());
    return found[found.size() / 2];
}

int main(int count, char **words) {
    if (count != 2) {
        fprintf(stderr, "usage: calls FILE\n");
        return 2;
    }
    int fd = open(words[1], O_RDWR);
    if (fd < 0) {
        perror(words[1]);
        return 1;
    }
    void *mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    page = (Page *)mapped;
    void *host, *device;
    CHECK(cudaMallocHost(&host, BYTES));
    CHECK(cudaMalloc(&device, BYTES));
    page->in = median([&] { CHECK(cudaMemcpy(device, host, BYTES, cudaMemcpyHostToDevice)); }, false);
    page->out = median([&] { CHECK(cudaMemcpy(host, device, BYTES, cudaMemcpyDeviceToHost)); }, false);
    page->launch = median([&] {
        empty<<<1, 1>>>();
        CHECK(cudaGetLastError());
    }, true);
    page->count = median([&] {
        int found;
        CHECK(cudaGetDeviceCount(&found));
    }, false);
    page->ready = 1;
    while (!page->stop)
        usleep(20000);
    return 0;
}
