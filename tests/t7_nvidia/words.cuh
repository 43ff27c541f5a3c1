// What the programs that work on memory of known contents share. To be included once `page` is there, whose `error` the
// test reads.
#pragma once

#include <cstdint>
#include <cstdio>
#include <ctime>
#include <unistd.h>

// Ends the program, whichever thread it is in.
#define CHECK(call)                                                                \
    do {                                                                           \
        cudaError_t e_ = (call);                                                   \
        if (e_ != cudaSuccess) {                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_));            \
            page->error = e_;                                                      \
            _exit(1);                                                              \
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

// After so many passes of work().
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
