// A CUDA program without a deadline. It works on state, and on results (activations) that it uses again and again and
// could recompute instead. Its speed depends on how much of both is on the GPU.
//
//     batch FILE MOUNT GPU STATE_MIB RESULTS_MIB
//
// A pass goes over all pieces. Missing results are computed into a scratch piece, which takes ROUNDS multiplications
// for each word. While it listens (`listen`, which may change at any time) it frees results when its usermemfd asks for
// memory, and allocates and computes them again when cudaMemGetInfo shows room. Otherwise it has all of them, and
// reclaim moves them to the host.
//
// FILE (a page on tmpfs): pieces worked on (u64 @0), wrong results (u64 @16, all ones until checked; wrong words of the
// state count, too), stop (u32 @24, set by the test), error (u32 @28), listen (u32 @32, set by the test), whether it
// listens on an open usermemfd (u32 @36: 0, 1, or 1000 plus errno), results that it has (u32 @40), number of requests
// (u32 @44), total of requested bytes (u64 @48), longest time to free in nanoseconds (u64 @56), results computed
// (u64 @64).
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
    volatile uint64_t passes, unused, wrong;
    volatile uint32_t stop, error, listen, listens, results, asked;
    volatile uint64_t asked_bytes, freed_ns, computed;
};

static const size_t PIECE = 64 << 20, WORDS = PIECE / 8;
static const int ROUNDS = 64;
static const size_t AT_ONCE = 8;          // pieces between two checks, and results that are allocated at once
static const size_t KEPT_PART = 50;       // the library keeps 2 % of freed memory for the next allocation
static const size_t MARGIN = 192 << 20;   // bytes of room that stay unused, since limits change
static const double LOOK_S = 0.01;        // seconds between two looks for room

static Page *page;
static std::vector<uint64_t *> state, results; // guarded by `mutex`; null: not there
static std::vector<uint64_t> used;             // number of uses of each result
static uint64_t *scratch;
static unsigned long long *sums; // sum over all uses of each result
static std::mutex mutex;
static std::atomic<bool> giving; // the working thread lets the other have the mutex

#include "words.cuh"

// Compute a result from nothing but its number.
__global__ void compute(uint64_t *words, size_t count, uint64_t number, int rounds) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t word = number * count + i;
        for (int round = 0; round < rounds; round++)
            word = word * 0x9E3779B97F4A7C15ull + round;
        words[i] = word;
    }
}

__global__ void use(const uint64_t *words, size_t count, unsigned long long *sum) {
    unsigned long long part = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        part += words[i];
    for (int lanes = 16; lanes; lanes /= 2)
        part += __shfl_down_sync(0xFFFFFFFFu, part, lanes);
    if (threadIdx.x % 32 == 0)
        atomicAdd(sum, part);
}

static void make(size_t number, uint64_t *words) {
    compute<<<1024, 256>>>(words, WORDS, number, ROUNDS);
    page->computed = page->computed + 1;
}

static void count_results() {
    uint32_t there = 0;
    for (uint64_t *words : results)
        there += words != nullptr;
    page->results = there;
}

static void give_back(uint64_t bytes) {
    double start = now();
    giving = true;
    {
        std::lock_guard<std::mutex> guard(mutex);
        const uint64_t held = (state.size() + page->results) * PIECE;
        const uint64_t enough = bytes + (held / KEPT_PART > PIECE ? held / KEPT_PART : PIECE);
        uint64_t freed = 0;
        for (size_t i = results.size(); i-- && freed < enough;)
            if (results[i]) {
                CHECK(cudaFree(results[i]));
                results[i] = nullptr;
                freed += PIECE;
            }
        count_results();
    }
    giving = false;
    const uint64_t took = (now() - start) * 1e9;
    page->freed_ns = took > page->freed_ns ? took : page->freed_ns;
    page->asked_bytes = page->asked_bytes + bytes;
    page->asked = page->asked + 1;
}

static void watch(const char *mount, int gpu) {
    int fd = -1;
    while (!page->stop) {
        if (page->listen && fd < 0) {
            fd = ggroup_usermem_open(mount, gpu);
            page->listens = fd < 0 ? 1000 + errno : 1;
        } else if (!page->listen && fd >= 0) {
            close(fd);
            fd = -1;
            page->listens = 0;
        }
        ggroup_usermem record;
        if (fd < 0)
            usleep(1000);
        else if (int got = ggroup_usermem_wait(fd, 20, &record)) {
            if (got < 0)
                break;
            give_back(record.bytes);
        }
    }
    if (fd >= 0)
        close(fd);
}

static bool has(size_t number) {
    std::lock_guard<std::mutex> guard(mutex);
    return results[number];
}

static uint64_t *piece() {
    uint64_t *words;
    CHECK(cudaMalloc(&words, PIECE));
    return words;
}

// Allocate some of the missing results, if there is room or the program does not listen. Allocate without the mutex: an
// allocation over a limit waits for memory that the other thread has to free.
static void grow() {
    static double next;
    if (page->results == results.size() || now() < next)
        return;
    size_t left, total, count = 0;
    CHECK(cudaMemGetInfo(&left, &total));
    for (size_t i = 0; i < results.size() && count < AT_ONCE && !giving; i++) {
        if (has(i))
            continue;
        if (page->listen && left < PIECE + MARGIN)
            break;
        uint64_t *words = piece();
        std::lock_guard<std::mutex> guard(mutex);
        make(i, results[i] = words);
        count_results();
        left -= left < PIECE ? left : PIECE;
        count++;
    }
    next = now() + (count == AT_ONCE ? 0 : LOOK_S);
}

static void work_on(size_t number) {
    if (number < state.size()) {
        work<<<1024, 256>>>(state[number], WORDS);
        return;
    }
    number -= state.size();
    uint64_t *words = results[number];
    if (!words)
        make(number, words = scratch);
    use<<<1024, 256>>>(words, WORDS, sums + number);
    used[number]++;
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    page->wrong = ~0ull;
    state.resize((strtoull(argv[4], nullptr, 10) << 20) / PIECE);
    results.resize((strtoull(argv[5], nullptr, 10) << 20) / PIECE);
    used.resize(results.size());
    const size_t count = state.size() + results.size();
    CHECK(cudaMalloc(&sums, (results.size() + 2) * sizeof *sums));
    CHECK(cudaMemset(sums, 0, (results.size() + 2) * sizeof *sums));
    scratch = piece();
    for (size_t i = 0; i < state.size(); i++)
        fill<<<1024, 256>>>(state[i] = piece(), WORDS, 0);
    for (size_t i = 0; i < results.size(); i++)
        make(i, results[i] = piece());
    count_results();
    CHECK(cudaDeviceSynchronize());
    std::thread watcher(watch, argv[2], atoi(argv[3]));
    uint64_t pass = 0;
    size_t next = 0;
    while (!page->stop) {
        while (giving)
            usleep(20);
        grow();
        std::lock_guard<std::mutex> guard(mutex);
        size_t done = 0;
        for (; done < AT_ONCE && next < count; done++)
            work_on(next++);
        CHECK(cudaDeviceSynchronize());
        page->passes = page->passes + done;
        if (next == count) {
            next = 0;
            pass++;
        }
    }
    watcher.join();
    pass += next > 0;
    for (; next && next < state.size(); next++) // so that all pieces have the same age
        work_on(next);
    unsigned long long *wrong = sums + results.size(), *right = wrong + 1, found;
    for (uint64_t *words : state)
        check<<<1024, 256>>>(words, WORDS, 0, pass, wrong);
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDefault));
    for (size_t i = 0; i < results.size(); i++) {
        unsigned long long sum, one;
        CHECK(cudaMemset(right, 0, sizeof *right));
        make(i, scratch);
        use<<<1024, 256>>>(scratch, WORDS, right);
        CHECK(cudaMemcpy(&one, right, sizeof one, cudaMemcpyDefault));
        CHECK(cudaMemcpy(&sum, sums + i, sizeof sum, cudaMemcpyDefault));
        found += sum != one * used[i];
    }
    page->wrong = found;
    for (std::vector<uint64_t *> *all : {&state, &results})
        for (uint64_t *words : *all)
            if (words)
                CHECK(cudaFree(words));
    return found != 0;
}
