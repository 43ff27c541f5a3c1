// A CUDA program that allocates GIB GiB in pieces of 64 MiB, in one of several ways, writes all of it, and holds it.
//
//     ways FILE WAY GIB
//
// FILE (a page on tmpfs): pieces that it has (u64 @0), stop (u32 @24, set by the test), error (u32 @28: of the failed
// allocation; it keeps what it has), done (u32 @32: it allocates no more).
#include <cuda.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

struct Page {
    volatile uint64_t pieces, unused[2];
    volatile uint32_t stop, error, done;
};

static Page *page;

static const size_t PIECE = 64u << 20;
static cudaMemPool_t pool;
static cudaArray_t arrays[1024];

static cudaError_t fill(void *piece) {
    return cudaMemset(piece, 1, PIECE);
}

static cudaError_t by_plain(void) {
    void *piece;
    cudaError_t error = cudaMalloc(&piece, PIECE);
    return error ? error : fill(piece);
}

static cudaError_t by_pitch(void) {
    void *piece;
    size_t pitch;
    cudaError_t error = cudaMallocPitch(&piece, &pitch, 65536, PIECE / 65536);
    return error ? error : cudaMemset2D(piece, pitch, 1, 65536, PIECE / 65536);
}

static cudaError_t by_async(void) {
    void *piece;
    cudaError_t error = cudaMallocAsync(&piece, PIECE, nullptr);
    return error ? error : fill(piece);
}

static cudaError_t by_pool(void) {
    cudaMemPoolProps props = {};
    cudaError_t error = cudaSuccess;
    void *piece;
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    if (!pool)
        error = cudaMemPoolCreate(&pool, &props);
    if (!error)
        error = cudaMallocFromPoolAsync(&piece, PIECE, pool, nullptr);
    return error ? error : fill(piece);
}

// The driver's errors have the same numbers.
static cudaError_t by_create(void) {
    CUmemAllocationProp prop = {};
    CUmemAccessDesc access = {};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address = 0;
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUresult code = cuMemCreate(&handle, PIECE, &prop, 0);
    if (!code)
        code = cuMemAddressReserve(&address, PIECE, 0, 0, 0);
    if (!code)
        code = cuMemMap(address, PIECE, 0, handle, 0);
    if (!code)
        code = cuMemSetAccess(address, PIECE, &access, 1);
    return code ? (cudaError_t)code : fill((void *)address);
}

static cudaError_t by_managed(void) {
    void *piece;
    cudaError_t error = cudaMallocManaged(&piece, PIECE);
    return error ? error : fill(piece);
}

static cudaError_t by_array(void) {
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    return cudaMallocArray(&arrays[page->pieces], &format, 4096, PIECE / 4096 / sizeof(float));
}

static cudaError_t by_ipc(void) {
    cudaIpcMemHandle_t handle;
    void *piece;
    cudaError_t error = cudaMalloc(&piece, PIECE);
    if (!error)
        error = cudaIpcGetMemHandle(&handle, piece);
    return error ? error : fill(piece);
}

// A graph that allocates, and does not free: its memory outlives its launch.
static cudaError_t by_graph(void) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    void *piece;
    cudaError_t error = cudaStreamCreate(&stream);
    if (!error)
        error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    if (!error)
        error = cudaMallocAsync(&piece, PIECE, stream);
    if (!error)
        error = cudaMemsetAsync(piece, 1, PIECE, stream);
    if (!error)
        error = cudaStreamEndCapture(stream, &graph);
    if (!error)
        error = cudaGraphInstantiate(&exec, graph, 0);
    return error ? error : cudaGraphLaunch(exec, stream);
}

static const struct {
    const char *name;
    cudaError_t (*allocate)(void);
} ways[] = {
    { "plain", by_plain }, { "pitch", by_pitch }, { "async", by_async }, { "pool", by_pool }, { "create", by_create },
    { "managed", by_managed }, { "array", by_array }, { "ipc", by_ipc }, { "graph", by_graph },
};

int main(int argc, char **argv) {
    cudaError_t (*allocate)(void) = nullptr;
    for (const auto &way : ways)
        if (argc == 4 && !strcmp(argv[2], way.name))
            allocate = way.allocate;
    if (!allocate)
        return 2;
    const uint64_t pieces = strtoull(argv[3], nullptr, 10) * ((1u << 30) / PIECE);
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
    if (pieces > sizeof(arrays) / sizeof(arrays[0]))
        return 2;
    cudaError_t error = cudaFree(nullptr);
    while (!error && !page->stop && page->pieces < pieces) {
        error = allocate();
        if (!error)
            error = cudaDeviceSynchronize();
        if (!error)
            page->pieces = page->pieces + 1;
    }
    if (error)
        fprintf(stderr, "%s: %s\n", argv[2], cudaGetErrorString(error));
    page->error = error;
    page->done = 1;
    while (!page->stop)
        usleep(1000);
    return 0;
}
