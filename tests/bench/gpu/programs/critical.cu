// A latency-critical CUDA program that serves requests as a language model decodes, or a convolutional network infers.
//
//     critical FILE decode|convolution
//
//     decode        a request is TOKENS tokens; each reads all weights once, in LAYERS x 4 matrix-vector products that
//                   are too small to fill the GPU for long: many short kernels, bound by memory
//     convolution   a request is CONVOLUTIONS convolutions of 3 x 3 over IMAGES images: few medium kernels, bound by
//                   arithmetic
//
// A request is one CUDA graph. A burst is a list of arrivals, which the caller writes before it says `go`. A request
// that comes while another is served waits, and that counts (open loop). A request that has not begun at `limit` is
// given up: its latency is its waiting time so far, and it does not count as served.
//
// FILE (SIZE bytes on tmpfs): requests of the burst that are over, served or not (u64 @0), ready (u64 @8), stop (u32
// @24, set by the caller), error (u32 @28), number of the burst to serve (u32 @32, set by the caller), of the last one
// that is over (u32 @36), its arrivals (u32 @40, set by the caller), number of served ones (u32 @44), its limit in
// nanoseconds since the start (u64 @48, set by the caller); from 4096 on, 4096 words each: arrivals in nanoseconds
// since the start, and latencies.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>

static const size_t MOST = 4096;

struct Page {
    volatile uint64_t over_requests, ready, unused;
    volatile uint32_t stop, error, go, over, count, served;
    volatile uint64_t limit;
    char rest[4096 - 56];
    volatile uint64_t arrival[MOST], latency[MOST];
};

static Page *page;

#include "words.cuh"

static const int WIDTH = 4096, LAYERS = 16, TOKENS = 4;
static const int SIDE = 128, CHANNELS = 16, IMAGES = 16, CONVOLUTIONS = 16;

// y = W x, one warp per row; W consists of rows of 16-bit floats, held as pairs.
__global__ void product(const uint32_t *matrix, const float *x, float *y, int columns) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4 *words = (const uint4 *)(matrix + (size_t)row * columns / 2);
    float sum = 0;
    for (int i = lane; i < columns / 8; i += 32) {
        const uint4 four = words[i];
        const uint32_t parts[4] = {four.x, four.y, four.z, four.w};
        for (int k = 0; k < 4; k++) {
            sum += __uint_as_float(parts[k] << 16) * x[8 * i + 2 * k];
            sum += __uint_as_float(parts[k] & 0xFFFF0000u) * x[8 * i + 2 * k + 1];
        }
    }
    for (int lanes = 16; lanes; lanes /= 2)
        sum += __shfl_down_sync(0xFFFFFFFFu, sum, lanes);
    if (lane == 0)
        y[row] = sum;
}

// One thread per pixel of an image and output channel.
__global__ void convolve(const float *in, const float *weights, float *out) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y, image = blockIdx.z / CHANNELS;
    const int to = blockIdx.z % CHANNELS;
    float sum = 0;
    for (int from = 0; from < CHANNELS; from++)
        for (int dy = -1; dy <= 1; dy++)
            for (int dx = -1; dx <= 1; dx++) {
                const int sx = min(max(x + dx, 0), SIDE - 1), sy = min(max(y + dy, 0), SIDE - 1);
                sum += in[((image * CHANNELS + from) * SIDE + sy) * SIDE + sx] *
                       weights[((to * CHANNELS + from) * 3 + dy + 1) * 3 + dx + 1];
            }
    out[((image * CHANNELS + to) * SIDE + y) * SIDE + x] = sum;
}

template <typename T> static T *zeros(size_t count) {
    T *memory;
    CHECK(cudaMalloc(&memory, count * sizeof(T)));
    CHECK(cudaMemset(memory, 0, count * sizeof(T)));
    return memory;
}

static void record_decode(cudaStream_t stream) {
    const size_t matrix = (size_t)WIDTH * WIDTH / 2;
    static uint32_t *weights = zeros<uint32_t>(matrix * 4 * LAYERS);
    static float *state = zeros<float>(WIDTH), *next = zeros<float>(WIDTH);
    for (int token = 0; token < TOKENS; token++)
        for (int layer = 0; layer < 4 * LAYERS; layer++) {
            product<<<WIDTH / 8, 256, 0, stream>>>(weights + layer * matrix, state, next, WIDTH);
            float *swapped = state;
            state = next;
            next = swapped;
        }
}

static void record_convolution(cudaStream_t stream) {
    const size_t pixels = (size_t)IMAGES * CHANNELS * SIDE * SIDE;
    static float *in = zeros<float>(pixels), *out = zeros<float>(pixels);
    static float *weights = zeros<float>(CHANNELS * CHANNELS * 9);
    for (int i = 0; i < CONVOLUTIONS; i++) {
        convolve<<<dim3(SIDE / 128, SIDE, IMAGES * CHANNELS), 128, 0, stream>>>(in, weights, out);
        float *swapped = in;
        in = out;
        out = swapped;
    }
}

static void wait_until(double due) {
    for (double left; (left = due - now()) > 0 && !page->stop;)
        if (left > 200e-6)
            usleep(100);
}

static void burst(cudaGraphExec_t request, cudaStream_t stream) {
    const double start = now();
    const uint32_t count = page->count < MOST ? page->count : MOST;
    page->over_requests = 0;
    page->served = 0;
    for (uint32_t i = 0; i < count && !page->stop; i++) {
        const double due = start + page->arrival[i] / 1e9, limit = start + page->limit / 1e9;
        wait_until(due);
        if (now() < limit) {
            CHECK(cudaGraphLaunch(request, stream));
            CHECK(cudaStreamSynchronize(stream));
            page->served = page->served + 1;
        }
        page->latency[i] = (now() - due) * 1e9;
        page->over_requests = i + 1;
    }
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t request;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const bool decode = !strcmp(argv[2], "decode");
    (decode ? record_decode : record_convolution)(stream); // allocates, which a capture may not do
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    (decode ? record_decode : record_convolution)(stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&request, graph, 0));
    for (int i = 0; i < 8; i++)
        CHECK(cudaGraphLaunch(request, stream));
    CHECK(cudaStreamSynchronize(stream));
    page->ready = 1;
    while (!page->stop) {
        if (page->go == page->over) {
            usleep(100);
            continue;
        }
        const uint32_t number = page->go;
        burst(request, stream);
        page->over = number;
    }
    return 0;
}
