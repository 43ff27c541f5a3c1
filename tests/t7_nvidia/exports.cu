// A CUDA program that makes 1 GiB in pieces of 64 MiB, exports a descriptor of each, and releases all of it.
//
//     exports FILE WAY
//
// WAY: `handle` (cuMemCreate, cuMemExportToShareableHandle), `fixed` (the same, compressible: not moved), `named`
// (cuMemAlloc, cuMemGetHandleForAddressRange: a dma-buf). FILE (a page on tmpfs): passes done (u64 @0), wrong words
// (u64 @16: none), stop (u32 @24, set by the test), error (u32 @28), step (u32 @32, set by the test: 1 release, 2
// close), step that is done (u32 @36).
#include <cuda.h>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

struct Page {
    volatile uint64_t passes, unused, wrong;
    volatile uint32_t stop, error, step, done;
};

static Page *page;

#define CALL(name, ...)                                           \
    do {                                                          \
        CUresult code_ = name(__VA_ARGS__);                       \
        if (code_ != CUDA_SUCCESS) {                              \
            fprintf(stderr, "%s: error %d\n", #name, (int)code_); \
            page->error = code_;                                  \
            _exit(1);                                             \
        }                                                         \
    } while (0)

static const size_t PIECE = 64u << 20;
static const int PIECES = 16;

static CUmemGenericAllocationHandle handles[PIECES];
static CUdeviceptr addresses[PIECES];
static int descriptors[PIECES];

static void make(const char *way, int i) {
    CUmemAllocationProp prop = {};
    if (!strcmp(way, "named")) {
        CALL(cuMemAlloc, &addresses[i], PIECE);
        CALL(cuMemGetHandleForAddressRange, &descriptors[i], addresses[i], PIECE,
             CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
        return;
    }
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.allocFlags.compressionType = strcmp(way, "fixed") ? 0 : CU_MEM_ALLOCATION_COMP_GENERIC;
    CALL(cuMemCreate, &handles[i], PIECE, &prop, 0);
    CALL(cuMemExportToShareableHandle, &descriptors[i], handles[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
    if (cudaFree(nullptr))
        return 1;
    for (int i = 0; i < PIECES; i++)
        make(argv[2], i);
    for (; !page->stop; usleep(1000)) {
        page->passes = page->passes + 1;
        if (page->step == page->done)
            continue;
        for (int i = 0; i < PIECES && page->done == 0; i++) {
            if (handles[i])
                CALL(cuMemRelease, handles[i]);
            else
                CALL(cuMemFree, addresses[i]);
        }
        for (int i = 0; i < PIECES && page->done == 1; i++)
            close(descriptors[i]);
        page->done = page->done + 1;
    }
    return 0;
}
