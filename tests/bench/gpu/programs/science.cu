// Scientific CUDA programs without a library: each pass goes over all of their memory, and writes part of it.
//
//     science FILE MIB KIND
//
// KIND: wavelet      one level of a 2D Haar transform of an image, rows and then columns, like dwt2d of Rodinia
//       stencil      seven points of a cube
//       gather       fluxes over four neighbours of each cell of an unstructured mesh, like cfd of Rodinia
//       neighbours   the distances of many places to one, and the least of them, like nn of Rodinia
//
// FILE is a page on tmpfs: passes done (u64 @0), wrong words (u64 @16, all ones until the program is told to stop, then
// 1 if the output of the last pass differs from that of the first), stop (u32 @24, set by the caller), error (u32 @28).
#include <cfloat>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>

struct Page {
    volatile uint64_t passes, unused, wrong;
    volatile uint32_t stop, error;
};

static Page *page;

#include "words.cuh"

static const int BLOCKS = 1056, THREADS = 256, IN_FLIGHT = 2, NEAR = 4096;

// Indices have 32 bits, enough for 16 GiB of floats: dividing longer ones takes longer than reading memory.
#define EACH(i, count)                                                                                       \
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += gridDim.x * blockDim.x)

__device__ static float value(uint32_t i) {
    return (float)((i * 2654435761u) >> 8) / (1 << 24);
}

__global__ void fill_floats(float *to, uint32_t count) {
    EACH(i, count) to[i] = value(i);
}

// Writes half the sums and half the differences side by side.
__global__ void haar_rows(const float *from, float *to, uint32_t side) {
    EACH(i, side * side / 2) {
        const uint32_t row = i / (side / 2), x = i % (side / 2);
        const float a = from[row * side + 2 * x], b = from[row * side + 2 * x + 1];
        to[row * side + x] = (a + b) / 2;
        to[row * side + side / 2 + x] = (a - b) / 2;
    }
}

__global__ void haar_columns(const float *from, float *to, uint32_t side) {
    EACH(i, side * side / 2) {
        const uint32_t y = i / side, x = i % side;
        const float a = from[2 * y * side + x], b = from[(2 * y + 1) * side + x];
        to[y * side + x] = (a + b) / 2;
        to[(side / 2 + y) * side + x] = (a - b) / 2;
    }
}

__global__ void stencil(const float *from, float *to, uint32_t side) {
    const uint32_t plane = side * side;
    EACH(i, side * plane) {
        const uint32_t x = i % side, y = i / side % side, z = i / plane;
        float sum = 0;
        if (x && x + 1 < side && y && y + 1 < side && z && z + 1 < side)
            sum = from[i - 1] + from[i + 1] + from[i - side] + from[i + side] + from[i - plane] + from[i + plane];
        to[i] = 0.4f * from[i] + 0.1f * sum;
    }
}

// Three neighbours of a cell are near, as in a numbered mesh, and one is anywhere.
__global__ void fill_neighbours(uint32_t *neighbours, uint32_t cells) {
    EACH(i, 4 * cells) {
        const uint32_t chance = i * 2654435761u;
        neighbours[i] = i % 4 < 3 ? (i / 4 + chance % NEAR) % cells : __umulhi(chance, cells);
    }
}

__global__ void gather(const uint32_t *neighbours, const float2 *cells, float2 *fluxes, uint32_t count) {
    EACH(i, count) {
        const float2 here = cells[i];
        float2 flux = {0, 0};
        for (int k = 0; k < 4; k++) {
            const float2 there = cells[neighbours[4 * (size_t)i + k]];
            flux.x += 0.5f * (there.x - here.x) * here.y;
            flux.y += 0.5f * (there.y - here.y) * here.x;
        }
        fluxes[i] = flux;
    }
}

__global__ void distances(const float2 *places, float *found, unsigned int *least, uint32_t count) {
    float mine = FLT_MAX;
    EACH(i, count) {
        const float x = places[i].x - 0.3f, y = places[i].y - 0.7f;
        found[i] = sqrtf(x * x + y * y);
        mine = fminf(mine, found[i]);
    }
    atomicMin(least, __float_as_uint(mine)); // the order of positive floats is that of their bits
}

// Returns a sum that depends on the position of each word.
__global__ void sum_up(const uint32_t *words, uint32_t count, unsigned long long *sum) {
    unsigned long long mine = 0;
    EACH(i, count) mine += words[i] * (2ull * i + 1);
    atomicAdd(sum, mine);
}

static float *input, *between, *output;
static uint32_t *neighbours;
static unsigned int *least;
static size_t side, count; // side of a square or a cube; number of cells or places
static size_t written;     // words of `output`
static const char *kind;

static bool is(const char *name) {
    return !strcmp(kind, name);
}

static float *floats(size_t many, bool filled) {
    float *found;
    CHECK(cudaMalloc(&found, many * sizeof *found));
    if (filled) {
        fill_floats<<<BLOCKS, THREADS>>>(found, many);
        CHECK(cudaGetLastError());
    }
    return found;
}

// Returns the largest even number whose power is at most `most`.
static size_t root(size_t most, int power) {
    size_t low = 2;
    for (size_t step = 1 << 20; step > 1; step /= 2) {
        size_t product = 1;
        for (int i = 0; i < power; i++)
            product *= low + step;
        if (product <= most)
            low += step;
    }
    return low;
}

static void make(size_t bytes) {
    if (is("wavelet")) {
        side = root(bytes / 12, 2);
        written = side * side;
        between = floats(written, false);
        input = floats(written, true);
    } else if (is("stencil")) {
        side = root(bytes / 8, 3);
        written = side * side * side;
        input = floats(written, true);
    } else if (is("gather")) {
        count = bytes / 32;
        written = 2 * count;
        input = floats(2 * count, true);
        CHECK(cudaMalloc(&neighbours, 16 * count));
        fill_neighbours<<<BLOCKS, THREADS>>>(neighbours, count);
        CHECK(cudaGetLastError());
    } else {
        count = written = bytes / 12;
        input = floats(2 * count, true);
        CHECK(cudaMalloc(&least, sizeof *least));
        CHECK(cudaMemset(least, 0xff, sizeof *least));
    }
    output = floats(written, false);
}

static void pass() {
    if (is("wavelet")) {
        haar_rows<<<BLOCKS, THREADS>>>(input, between, side);
        haar_columns<<<BLOCKS, THREADS>>>(between, output, side);
    } else if (is("stencil")) {
        stencil<<<BLOCKS, THREADS>>>(input, output, side);
    } else if (is("gather")) {
        gather<<<BLOCKS, THREADS>>>(neighbours, (const float2 *)input, (float2 *)output, count);
    } else {
        distances<<<BLOCKS, THREADS>>>((const float2 *)input, output, least, count);
    }
    CHECK(cudaGetLastError());
}

static unsigned long long summed() {
    unsigned long long *sum, found;
    CHECK(cudaMalloc(&sum, sizeof *sum));
    CHECK(cudaMemset(sum, 0, sizeof *sum));
    sum_up<<<BLOCKS, THREADS>>>((const uint32_t *)output, written, sum);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&found, sum, sizeof found, cudaMemcpyDefault));
    CHECK(cudaFree(sum));
    return found;
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    const int file = open(argv[1], O_RDWR);
    page = (Page *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    page->wrong = ~0ull;
    kind = argv[3];
    if (!is("wavelet") && !is("stencil") && !is("gather") && !is("neighbours"))
        return 2;
    make(strtoull(argv[2], nullptr, 10) << 20);
    cudaEvent_t events[IN_FLIGHT];
    for (cudaEvent_t &event : events)
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    pass();
    const unsigned long long first = summed();
    uint64_t launched = 0;
    while (!page->stop) {
        if (launched - page->passes >= IN_FLIGHT) {
            CHECK(cudaEventSynchronize(events[launched % IN_FLIGHT]));
            page->passes = page->passes + 1;
        }
        pass();
        CHECK(cudaEventRecord(events[launched % IN_FLIGHT]));
        launched++;
    }
    CHECK(cudaDeviceSynchronize());
    page->wrong = summed() != first;
    return page->wrong != 0;
}
