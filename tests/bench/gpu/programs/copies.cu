// A CUDA program that copies between the GPU and pinned host memory by cudaMemcpyAsync, as fast as that goes.
//
//     copies FILE MIB
//
// FILE (a page on tmpfs): ready (u64 @8), stop (u32 @24, set by the caller), error (u32 @28), number of the measurement
// to make (u32 @32, set by the caller), of the last one that is over (u32 @36), bytes a second to the host, to the GPU
// (u64 @40, @48).
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>

struct Page {
    volatile uint64_t unused, ready, unused_too;
    volatile uint32_t stop, error, go, over;
    volatile uint64_t out, in;
};

static Page *page;

#include "words.cuh"

static uint64_t timed(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    const double start = now();
    CHECK(cudaMemcpyAsync(to, from, bytes, kind, 0));
    CHECK(cudaStreamSynchronize(0));
    return bytes / (now() - start);
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const size_t bytes = strtoull(argv[2], nullptr, 10) << 20;
    void *device, *host;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMemset(device, 1, bytes));
    CHECK(cudaMallocHost(&host, bytes));
    timed(host, device, bytes, cudaMemcpyDeviceToHost);
    page->ready = 1;
    while (!page->stop) {
        if (page->go == page->over) {
            usleep(200);
            continue;
        }
        page->out = timed(host, device, bytes, cudaMemcpyDeviceToHost);
        page->in = timed(device, host, bytes, cudaMemcpyHostToDevice);
        page->over = page->go;
    }
    CHECK(cudaFreeHost(host));
    return 0;
}
