// A CUDA program that knows nothing of ggroupfs: it allocates memory, works through all of it again and again, and
// checks every word of it in the end.
//
//     elastic FILE MIB [PARTS [OPTION...]]
//
// FILE (a page on tmpfs): passes done (u64 @0), bytes a second of the last pass (u64 @8), wrong words (u64 @16, all
// ones until checked), stop (u32 @24, set by the test), error (u32 @28), total and free of cudaMemGetInfo (u64 @32,
// @40). With `managed` only, once running: bytes a second of a prefetch of half of the memory to the host, and back
// (u64 @48, @56). Nanoseconds of the last pass over the hot memory, and of the last one over everything (u64 @64, @72).
//
// With parts, each is an allocation of its own; the last half of them is cold: used in every eighth pass only.
//
// OPTIONs:
//     inner       no part is cold
//     steps       a pass is STEP times all of the memory, after a rest; it begins with an event that another stream
//                 waits for, and then with an event of that stream
//     managed     unified memory
//     a number    keep at most so many MiB of it on the GPU, as if the driver had such a limit: before a missing part
//                 is used, the least recently used ones are sent to the host (cudaMemPrefetchAsync), and with
//     faults      the part comes by page faults of the kernel that uses it
//     prefetch    the part is prefetched
//     advised     nothing moves: the excess lives in the host, the last parts (the cold ones) first, and kernels use
//                 it there (cudaMemAdvise), which takes a programmer that knows what is cold
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
    volatile uint64_t total, free, prefetch_out, prefetch_in, hot_ns, full_ns;
};

static Page *page;

#include "words.cuh"

#if CUDART_VERSION >= 13000
static cudaMemLocation location(int where) {
    return {where < 0 ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice, where < 0 ? 0 : where};
}
#else
static int location(int where) {
    return where < 0 ? cudaCpuDeviceId : where;
}
#endif

// Prefetch memory to GPU `where`, or to the host for -1.
static void send(const void *memory, size_t bytes, int where) {
#if CUDART_VERSION >= 13000
    CHECK(cudaMemPrefetchAsync(memory, bytes, location(where), 0));
#else
    CHECK(cudaMemPrefetchAsync(memory, bytes, location(where)));
#endif
}

static uint64_t timed_send(const void *memory, size_t bytes, int where) {
    double start = now();
    send(memory, bytes, where);
    CHECK(cudaDeviceSynchronize());
    return bytes / (now() - start);
}

struct Part {
    uint64_t *words;
    uint64_t done;     // passes
    uint64_t last_use; // value of `uses`
    bool resident;     // whether it is on the GPU, for parts within a budget
};

static std::vector<Part> parts;
static size_t part_bytes, budget, resident; // bytes; a budget of 0 is none
static uint64_t uses;
static bool prefetches;

#define STEP 32       // passes over all memory in a step, some 80 ms for 4 GiB
#define REST_NS 80000000 // rest before each step

// Begin a step. Earlier launches are done, so that nothing but these calls brings work.
static void begin_step() {
    static cudaStream_t other;
    static cudaEvent_t ours, theirs;
    const struct timespec rest = {0, REST_NS};
    if (!other) {
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&ours, cudaEventDisableTiming));
        CHECK(cudaEventCreateWithFlags(&theirs, cudaEventDisableTiming));
    }
    nanosleep(&rest, nullptr);
    CHECK(cudaEventRecord(ours, 0));
    CHECK(cudaStreamWaitEvent(other, ours, 0));
    CHECK(cudaEventRecord(theirs, other));
    CHECK(cudaStreamWaitEvent(0, theirs, 0));
}

// Make room for a part before it is used, and prefetch it where that is asked for.
static void fetch(Part &part) {
    part.last_use = ++uses;
    if (!budget || part.resident)
        return;
    while (resident + part_bytes > budget) {
        Part *oldest = nullptr;
        for (Part &one : parts)
            if (one.resident && (!oldest || one.last_use < oldest->last_use))
                oldest = &one;
        if (!oldest)
            break;
        send(oldest->words, part_bytes, -1);
        oldest->resident = false;
        resident -= part_bytes;
    }
    if (prefetches)
        send(part.words, part_bytes, 0);
    part.resident = true;
    resident += part_bytes;
}

// Have the excess over the budget live in the host from now on, the last parts first, and the rest on the GPU.
static void advise() {
    const size_t bytes = part_bytes * parts.size(), granule = 2 << 20;
    size_t excess = bytes > budget ? (bytes - budget + granule - 1) / granule * granule : 0;
    for (size_t i = parts.size(); i--;) {
        size_t away = excess < part_bytes ? excess : part_bytes;
        char *start = (char *)parts[i].words, *end = start + part_bytes;
        excess -= away;
        if (away) {
            CHECK(cudaMemAdvise(end - away, away, cudaMemAdviseSetPreferredLocation, location(-1)));
            CHECK(cudaMemAdvise(end - away, away, cudaMemAdviseSetAccessedBy, location(0)));
            send(end - away, away, -1);
        }
        if (away < part_bytes)
            send(start, part_bytes - away, 0);
    }
    budget = 0;
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    int fd = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    page->wrong = ~0ull;
    const size_t bytes = strtoull(argv[2], nullptr, 10) << 20;
    const int count = argc > 3 ? atoi(argv[3]) : 1;
    bool managed = false, inner = count == 1, advised = false, steps = false;
    for (int i = 4; i < argc; i++) {
        managed |= !strcmp(argv[i], "managed");
        inner |= !strcmp(argv[i], "inner");
        advised |= !strcmp(argv[i], "advised");
        steps |= !strcmp(argv[i], "steps");
        prefetches |= !strcmp(argv[i], "prefetch");
        if (size_t mib = strtoull(argv[i], nullptr, 10))
            budget = mib << 20;
    }
    const size_t words = bytes / 8 / count;
    part_bytes = words * 8;
    parts.resize(count);
    size_t total, left;
    unsigned long long *wrong;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    for (Part &part : parts)
        if (managed)
            CHECK(cudaMallocManaged(&part.words, part_bytes));
    if (advised)
        advise();
    for (int i = 0; i < count; i++) {
        if (!managed)
            CHECK(cudaMalloc(&parts[i].words, part_bytes));
        fetch(parts[i]);
        fill<<<1024, 256>>>(parts[i].words, words, i * words);
        CHECK(cudaGetLastError());
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemGetInfo(&left, &total));
    page->total = total;
    page->free = left;
    if (managed && count == 1) {
        page->prefetch_out = timed_send(parts[0].words, bytes / 2, -1);
        page->prefetch_in = timed_send(parts[0].words, bytes / 2, 0);
    }
    for (uint64_t pass = 0; !page->stop; pass++) {
        const bool all = inner || pass % 8 == 0;
        const int used = all ? count : count / 2, uses_each = steps ? STEP : 1;
        if (steps)
            begin_step();
        double start = now();
        for (int use = 0; use < used * uses_each; use++) {
            const int i = use % used;
            fetch(parts[i]);
            work<<<1024, 256>>>(parts[i].words, words);
            parts[i].done++;
        }
        CHECK(cudaDeviceSynchronize());
        double took = now() - start;
        page->rate = used * uses_each * part_bytes / took;
        (all ? page->full_ns : page->hot_ns) = took * 1e9;
        page->passes = pass + 1;
    }
    for (int i = 0; i < count; i++)
        check<<<1024, 256>>>(parts[i].words, words, i * words, parts[i].done, wrong);
    unsigned long long found;
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDefault));
    page->wrong = found;
    for (Part &part : parts)
        CHECK(cudaFree(part.words));
    return found != 0;
}
