// A CUDA program with memory that it always works on, a cache besides, and a usermemfd (ggroup_usermem.h).
//
//     cache FILE MOUNT GPU listen|ignore HOT_MIB CACHE_MIB
//
// Each pass works through all hot memory and looks into one piece of the cache. Once told to open its usermemfd it
// either listens there, and frees as much of the cache as requested, or never reads.
//
// FILE (a page on tmpfs): passes done (u64 @0), bytes a second of the last pass (u64 @8), wrong words (u64 @16, all
// ones until checked), stop (u32 @24, set by the test), error (u32 @28), open the usermemfd (u32 @32, set by the test),
// whether it is open (u32 @36: 1, or 1000 plus errno), pieces in the cache (u32 @40), number of requests (u32 @44),
// bytes of the last request (u64 @48), nanoseconds from then until they were freed (u64 @56).
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "ggroup_usermem.h"

struct Page {
    volatile uint64_t passes, rate, wrong;
    volatile uint32_t stop, error, open, opened, pieces, asked;
    volatile uint64_t asked_bytes, freed_ns;
};

static const size_t PIECE = 64 << 20;

static Page *page;
static std::vector<uint64_t *> cache; // guarded by `mutex`
static std::mutex mutex;
static std::atomic<bool> giving; // the working thread lets the other have the mutex

#include "words.cuh"

static void give_back(uint64_t bytes) {
    double start = now();
    page->asked_bytes = bytes;
    giving = true;
    {
        std::lock_guard<std::mutex> guard(mutex);
        for (uint64_t freed = 0; freed < bytes && !cache.empty(); freed += PIECE) {
            CHECK(cudaFree(cache.back()));
            cache.pop_back();
        }
        page->pieces = cache.size();
    }
    giving = false;
    page->freed_ns = (now() - start) * 1e9;
    page->asked = page->asked + 1;
}

static void watch(const char *mount, int gpu, bool listens) {
    while (!page->open && !page->stop)
        usleep(1000);
    if (page->stop)
        return;
    int fd = ggroup_usermem_open(mount, gpu);
    page->opened = fd < 0 ? 1000 + errno : 1;
    while (fd >= 0 && !page->stop) {
        ggroup_usermem record;
        if (!listens)
            usleep(10000);
        else if (int got = ggroup_usermem_wait(fd, 100, &record)) {
            if (got < 0)
                break;
            give_back(record.bytes);
        }
    }
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv) {
    if (argc != 7)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    page->wrong = ~0ull;
    const bool listens = !strcmp(argv[4], "listen");
    const size_t hot_bytes = strtoull(argv[5], nullptr, 10) << 20, words = hot_bytes / 8;
    cache.resize((strtoull(argv[6], nullptr, 10) << 20) / PIECE);
    uint64_t *hot, pass = 0;
    unsigned long long *wrong, found;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CHECK(cudaMalloc(&hot, hot_bytes));
    fill<<<1024, 256>>>(hot, words, 0);
    for (uint64_t *&piece : cache) {
        CHECK(cudaMalloc(&piece, PIECE));
        fill<<<1024, 256>>>(piece, PIECE / 8, 0);
    }
    CHECK(cudaDeviceSynchronize());
    page->pieces = cache.size();
    std::thread watcher(watch, argv[2], atoi(argv[3]), listens);
    for (; !page->stop; pass++) {
        while (giving)
            usleep(20);
        std::lock_guard<std::mutex> guard(mutex);
        double start = now();
        work<<<1024, 256>>>(hot, words);
        if (!cache.empty())
            check<<<1024, 256>>>(cache[pass % cache.size()], PIECE / 8, 0, 0, wrong);
        CHECK(cudaDeviceSynchronize());
        page->rate = hot_bytes / (now() - start);
        page->passes = pass + 1;
    }
    watcher.join();
    check<<<1024, 256>>>(hot, words, 0, pass, wrong);
    for (uint64_t *piece : cache)
        check<<<1024, 256>>>(piece, PIECE / 8, 0, 0, wrong);
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDefault));
    page->wrong = found;
    for (uint64_t *piece : cache)
        CHECK(cudaFree(piece));
    CHECK(cudaFree(hot));
    return found != 0;
}
