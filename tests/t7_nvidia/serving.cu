// A CUDA program that serves requests as a language model does: with weights that stay, and memory for each request
// (its KV cache) that is allocated as requests come and freed when none has come for a while.
//
//     serving FILE WEIGHTS_MIB KV_MIB
//
// A burst is a list of arrivals, which the test writes before it says `go`. A request that comes while another is
// served waits, and that counts (open loop). A request brings INPUT bytes over the bus, gets a piece of KV (a new one
// until there are KV_MIB; then the oldest), and takes STEPS steps, each of which reads and checks all weights and the
// piece.
//
// FILE (SIZE bytes on tmpfs): requests done (u64 @0), wrong words (u64 @16, all ones until checked), stop (u32 @24, set
// by the test), error (u32 @28), number of the burst to serve (u32 @32, set by the test), of the last one that is over
// (u32 @36), its arrivals (u32 @40, set by the test), pieces that are held (u32 @44); from 4096 on, 4096 words each:
// arrivals in nanoseconds since the start, latencies in nanoseconds, nanoseconds that the request was in cudaMalloc.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

static const size_t MOST = 4096;

struct Page {
    volatile uint64_t done, unused, wrong;
    volatile uint32_t stop, error, go, over, count, pieces;
    char rest[4096 - 48];
    volatile uint64_t arrival[MOST], latency[MOST], wait[MOST];
};

static const size_t PIECE = 32 << 20, INPUT = 16 << 20;
static const int STEPS = 6;
static const double KEEP_S = 0.1; // seconds without a request before memory is freed

static Page *page;

#include "words.cuh"

static uint64_t *weights, *input, *input_host;
static size_t weight_words, most, next_piece;
static std::vector<uint64_t *> pieces;
static unsigned long long *wrong;

// Serve a request; return the seconds that it was in cudaMalloc.
static double serve(uint64_t number) {
    double waited = 0;
    CHECK(cudaMemcpyAsync(input, input_host, INPUT, cudaMemcpyHostToDevice, 0));
    if (pieces.size() < most) {
        double start = now();
        uint64_t *piece;
        CHECK(cudaMalloc(&piece, PIECE));
        waited = now() - start;
        pieces.push_back(piece);
        page->pieces = pieces.size();
        next_piece = pieces.size() - 1;
    } else {
        next_piece = (next_piece + 1) % pieces.size();
    }
    uint64_t *piece = pieces[next_piece];
    fill<<<1024, 256>>>(piece, PIECE / 8, number);
    for (int step = 0; step < STEPS; step++) {
        check<<<1024, 256>>>(weights, weight_words, 0, 0, wrong);
        check<<<1024, 256>>>(piece, PIECE / 8, number, 0, wrong);
    }
    check<<<1024, 256>>>(input, INPUT / 8, 0, 0, wrong);
    CHECK(cudaDeviceSynchronize());
    page->done = page->done + 1;
    return waited;
}

static void free_all() {
    for (uint64_t *piece : pieces)
        CHECK(cudaFree(piece));
    pieces.clear();
    page->pieces = 0;
}

static void wait_until(double due) {
    for (double left; (left = due - now()) > 0;)
        if (left > 200e-6)
            usleep(100);
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    page->wrong = ~0ull;
    const size_t weight_bytes = strtoull(argv[2], nullptr, 10) << 20;
    weight_words = weight_bytes / 8;
    most = (strtoull(argv[3], nullptr, 10) << 20) / PIECE;
    CHECK(cudaMalloc(&wrong, sizeof *wrong));
    CHECK(cudaMemset(wrong, 0, sizeof *wrong));
    CHECK(cudaMalloc(&weights, weight_bytes));
    fill<<<1024, 256>>>(weights, weight_words, 0);
    CHECK(cudaMalloc(&input, INPUT));
    fill<<<1024, 256>>>(input, INPUT / 8, 0);
    CHECK(cudaMallocHost(&input_host, INPUT));
    CHECK(cudaMemcpy(input_host, input, INPUT, cudaMemcpyDeviceToHost));
    for (uint64_t i = 0; i < 4; i++)
        serve(i);
    free_all();
    while (!page->stop) {
        if (page->go == page->over) {
            usleep(200);
            continue;
        }
        double start = now();
        const uint32_t count = page->count < MOST ? page->count : MOST;
        for (uint32_t i = 0; i < count && !page->stop; i++) {
            double due = start + page->arrival[i] / 1e9;
            wait_until(due);
            page->wait[i] = serve(i) * 1e9;
            page->latency[i] = (now() - due) * 1e9;
        }
        wait_until(now() + KEEP_S);
        free_all();
        page->over = page->go;
    }
    unsigned long long found;
    CHECK(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDefault));
    page->wrong = found;
    CHECK(cudaFreeHost(input_host));
    CHECK(cudaFree(input));
    CHECK(cudaFree(weights));
    return found != 0;
}
