// A CUDA program with two threads: one works on its memory all the time, the other allocates more, works on that, holds
// it and frees it, again and again, and reports how long each cudaMalloc took.
//
//     alloc FILE HOT_MIB PIECE_MIB PIECES HOLD_MS GAP_MS
//
// FILE (16 pages on tmpfs): passes over the hot memory (u64 @0), bytes a second of the last pass (u64 @8), wrong words
// (u64 @16, all ones until checked), stop (u32 @24, set by the test), error (u32 @28), go (u32 @32, set by the test),
// idle (u32 @36: only the hot memory is allocated), allocations (u64 @40), nanoseconds of each (u64s @64; once they are
// full, the last place is overwritten).
// used again once they are full).
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

static const size_t PAGE_BYTES = 65536, TIMES = (PAGE_BYTES - 64) / 8;

struct Page {
    volatile uint64_t passes, rate, wrong;
    volatile uint32_t stop, error, go, idle;
    volatile uint64_t allocations, unused[2];
    volatile uint64_t times[TIMES];
};
static_assert(sizeof(Page) == PAGE_BYTES, "the test reads it");

static Page *page;

#include "words.cuh"

static void allocate(size_t bytes, int count, int hold_ms, int gap_ms, unsigned long long *wrong) {
    std::vector<uint64_t *> pieces(count);
    while (!page->stop) {
        if (!page->go) {
            page->idle = 1;
            usleep(1000);
            continue;
        }
        page->idle = 0;
        for (uint64_t *&piece : pieces) {
            double start = now();
            CHECK(cudaMalloc(&piece, bytes));
            double took = now() - start;
            uint64_t number = page->allocations;
            page->times[number < TIMES ? number : TIMES - 1] = took * 1e9;
            page->allocations = number + 1;
            fill<<<1024, 256>>>(piece, bytes / 8, 0);
        }
        usleep(hold_ms * 1000);
        for (uint64_t *piece : pieces) {
            check<<<1024, 256>>>(piece, bytes / 8, 0, 0, wrong);
            CHECK(cudaFree(piece));
        }
        usleep(gap_ms * 1000);
    }
}

int main(int argc, char **argv) {
    if (argc != 7)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    page->wrong = ~0ull;
    const size_t hot_bytes = strtoull(argv[2], nullptr, 10) << 20, words = hot_bytes / 8;
    const size_t piece_bytes = strtoull(argv[3], nullptr, 10) << 20;
    uint64_t *hot, pass = 0;
    unsigned long long *wrong, found;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CHECK(cudaMalloc(&hot, hot_bytes));
    fill<<<1024, 256>>>(hot, words, 0);
    CHECK(cudaDeviceSynchronize());
    std::thread allocator(allocate, piece_bytes, atoi(argv[4]), atoi(argv[5]), atoi(argv[6]), wrong);
    for (; !page->stop; pass++) {
        double start = now();
        work<<<1024, 256>>>(hot, words);
        CHECK(cudaDeviceSynchronize());
        page->rate = hot_bytes / (now() - start);
        page->passes = pass + 1;
    }
    allocator.join();
    check<<<1024, 256>>>(hot, words, 0, pass, wrong);
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDefault));
    page->wrong = found;
    CHECK(cudaFree(hot));
    return found != 0;
}
