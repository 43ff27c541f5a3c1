// GPU memory that is held and never used, so that others have as much as a card with less of it has.
//
//     ballast FILE MIB
//
// FILE (a page on tmpfs): ready (u64 @8), stop (u32 @24, set by the caller), error (u32 @28).

#include <cuda_runtime.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct Page {
    volatile uint64_t passes, ready, wrong;
    volatile uint32_t stop, error;
};

int main(int count, char **words) {
    if (count != 3) {
        fprintf(stderr, "usage: ballast FILE MIB\n");
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
    Page *page = (Page *)mapped;
    void *memory;
    cudaError_t error = cudaMalloc(&memory, strtoull(words[2], nullptr, 10) << 20);
    if (error != cudaSuccess) {
        page->error = error;
        fprintf(stderr, "cudaMalloc of %s MiB: %s\n", words[2], cudaGetErrorString(error));
        return 1;
    }
    page->ready = 1;
    while (!page->stop)
        usleep(20000);
    return 0;
}
