// A CUDA program without a deadline: products of SIDE x SIDE float matrices, back to back, that fill the GPU.
//
//     products FILE
//
// FILE (a page on tmpfs): products done (u64 @0), ready (u64 @8), stop (u32 @24, set by the caller), error (u32 @28),
// work (u32 @32, set by the caller: 1 to go on, 0 to stand idle), idle (u32 @36: 1 while idle, with nothing left on the
// GPU), CLOCK_MONOTONIC just after its context was made, nanoseconds (u64 @40).
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>

struct Page {
    volatile uint64_t done, ready, unused;
    volatile uint32_t stop, error, work, idle;
    volatile uint64_t created_ns;
};

static Page *page;

#include "words.cuh"

static const int SIDE = 2048, TILE = 64, STEP = 16, IN_FLIGHT = 8;

// A block of 256 threads computes a tile of 64 x 64, each thread 4 x 4 of it.
__global__ void product(const float *a, const float *b, float *c) {
    __shared__ float rows[STEP][TILE], columns[STEP][TILE];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    float sum[4][4] = {};
    for (int k = 0; k < SIDE; k += STEP) {
        for (int i = threadIdx.x; i < TILE * STEP; i += 256) {
            rows[i % STEP][i / STEP] = a[(size_t)(row + i / STEP) * SIDE + k + i % STEP];
            columns[i / TILE][i % TILE] = b[(size_t)(k + i / TILE) * SIDE + column + i % TILE];
        }
        __syncthreads();
        for (int s = 0; s < STEP; s++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] += rows[s][ty * 4 + i] * columns[s][tx * 4 + j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            c[(size_t)(row + ty * 4 + i) * SIDE + column + tx * 4 + j] = sum[i][j];
}

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const size_t bytes = (size_t)SIDE * SIDE * sizeof(float);
    CHECK(cudaFree(nullptr));
    page->created_ns = now() * 1e9;
    float *a, *b, *c;
    cudaEvent_t events[IN_FLIGHT];
    for (float **matrix : {&a, &b, &c}) {
        CHECK(cudaMalloc(matrix, bytes));
        CHECK(cudaMemset(*matrix, 0, bytes));
    }
    for (cudaEvent_t &event : events)
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    CHECK(cudaDeviceSynchronize());
    page->idle = 1;
    page->ready = 1;
    uint64_t launched = 0;
    while (!page->stop) {
        if (!page->work) {
            if (!page->idle) {
                CHECK(cudaDeviceSynchronize());
                page->done = launched;
                page->idle = 1;
            }
            usleep(200);
            continue;
        }
        page->idle = 0;
        if (launched - page->done >= IN_FLIGHT) {
            CHECK(cudaEventSynchronize(events[launched % IN_FLIGHT]));
            page->done = page->done + 1;
        }
        product<<<dim3(SIDE / TILE, SIDE / TILE), 256>>>(a, b, c);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(events[launched % IN_FLIGHT]));
        launched++;
    }
    CHECK(cudaDeviceSynchronize());
    return 0;
}
