// A CUDA program that copies between the GPU and pinned host memory by cudaMemcpyAsync, as fast as possible.
//
//     copies FILE MIB
//
// FILE is a page on tmpfs: ready (u64 @8), stop (u32 @24, set by the caller), error (u32 @28), number of the
// measurement to make (u32 @32, set by the caller), number of the last one that is finished (u32 @36), bytes a second
// to the host and to the GPU (u64 @40, @48), and in each direction while both are busy (u64 @56, @64).
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>

struct Page {
    volatile uint64_t unused, ready, unused_too;
    volatile uint32_t stop, error, go, over;
    volatile uint64_t out, in, both_out, both_in;
};

static Page *page;

#include "words.cuh"

static uint64_t timed(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    const double start = now();
    CHECK(cudaMemcpyAsync(to, from, bytes, kind, 0));
    CHECK(cudaStreamSynchronize(0));
    return bytes / (now() - start);
}

// Copies in both directions at once, by halves of the same memory: both rates are over the time of the slower one.
static void both(char *device, char *host, size_t bytes) {
    static cudaStream_t streams[2];
    for (cudaStream_t &stream : streams)
        if (!stream)
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const double start = now();
    CHECK(cudaMemcpyAsync(host, device, bytes / 2, cudaMemcpyDeviceToHost, streams[0]));
    CHECK(cudaMemcpyAsync(device + bytes / 2, host + bytes / 2, bytes / 2, cudaMemcpyHostToDevice, streams[1]));
    for (cudaStream_t stream : streams)
        CHECK(cudaStreamSynchronize(stream));
    page->both_out = page->both_in = bytes / 2 / (now() - start);
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
        both((char *)device, (char *)host, bytes);
        page->over = page->go;
    }
    CHECK(cudaFreeHost(host));
    return 0;
}
