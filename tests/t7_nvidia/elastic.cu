// A CUDA program that knows nothing of ggroupfs: allocates memory, works through all of it again and again, and checks
// every word of it in the end.
//
//     elastic FILE MIB [PARTS [managed]]
//
// FILE (a page on tmpfs): passes done (u64 @0), bytes a second of the last pass (u64 @8), words wrong (u64 @16, all ones until
// checked), stop (u32 @24, set by the test), error (u32 @28), what cudaMemGetInfo said: total, free (u64 @32, @40); managed
// only, once running: bytes a second of a prefetch of half of it to the host, and back (u64 @48, @56).
// With parts, each is an allocation of its own; the last half of them is used in every eighth pass only: cold.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <vector>

struct Page {
    volatile uint64_t passes, rate, wrong;
    volatile uint32_t stop, error;
    volatile uint64_t total, free, prefetch_out, prefetch_in;
};

static Page *page;

#define CHECK(call)                                                                \
    do {                                                                           \
        cudaError_t e_ = (call);                                                   \
        if (e_ != cudaSuccess) {                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_));            \
            page->error = e_;                                                      \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

__global__ void fill(uint64_t *words, size_t count, uint64_t first) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        words[i] = (first + i) * 0x9E3779B97F4A7C15ull;
}

__global__ void work(uint64_t *words, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        words[i] += 1;
}

__global__ void check(const uint64_t *words, size_t count, uint64_t first, uint64_t passes, unsigned long long *wrong) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        if (words[i] != (first + i) * 0x9E3779B97F4A7C15ull + passes)
            atomicAdd(wrong, 1ull);
}

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static uint64_t prefetch(char *memory, size_t bytes, int where) {
    double start = now();
#if CUDART_VERSION >= 13000
    cudaMemLocation location = {where < 0 ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice, where < 0 ? 0 : where};
    CHECK(cudaMemPrefetchAsync(memory, bytes, location, 0));
#else
    CHECK(cudaMemPrefetchAsync(memory, bytes, where < 0 ? cudaCpuDeviceId : where));
#endif
    CHECK(cudaDeviceSynchronize());
    return bytes / (now() - start);
}

int main(int argc, char **argv) {
    int fd = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    page->wrong = ~0ull;
    const size_t bytes = strtoull(argv[2], nullptr, 10) << 20;
    const int parts = argc > 3 ? atoi(argv[3]) : 1;
    const bool managed = argc > 4 && !strcmp(argv[4], "managed");
    const size_t words = bytes / 8 / parts;
    std::vector<uint64_t *> memory(parts);
    std::vector<uint64_t> done(parts);
    size_t total, left;
    unsigned long long *wrong;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    for (int i = 0; i < parts; i++) {
        if (managed)
            CHECK(cudaMallocManaged(&memory[i], words * 8));
        else
            CHECK(cudaMalloc(&memory[i], words * 8));
        fill<<<1024, 256>>>(memory[i], words, i * words);
        CHECK(cudaGetLastError());
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemGetInfo(&left, &total));
    page->total = total;
    page->free = left;
    if (managed && parts == 1) {
        page->prefetch_out = prefetch((char *)memory[0], bytes / 2, -1);
        page->prefetch_in = prefetch((char *)memory[0], bytes / 2, 0);
    }
    for (uint64_t pass = 0; !page->stop; pass++) {
        double start = now();
        size_t used = 0;
        for (int i = 0; i < parts; i++) {
            if (parts > 1 && i >= parts / 2 && pass % 8)
                continue;
            work<<<1024, 256>>>(memory[i], words);
            done[i]++;
            used += words * 8;
        }
        CHECK(cudaDeviceSynchronize());
        page->rate = used / (now() - start);
        page->passes = pass + 1;
    }
    for (int i = 0; i < parts; i++)
        check<<<1024, 256>>>(memory[i], words, i * words, done[i], wrong);
    unsigned long long found;
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDefault));
    page->wrong = found;
    for (auto *one : memory)
        CHECK(cudaFree(one));
    return found != 0;
}
