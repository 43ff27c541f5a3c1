// A CUDA program that serves from GIB GiB made by cuMemCreate, and sleeps as inference servers do: the contents go to
// host memory, the memory is released, and it is made again under the same addresses when the program wakes.
//
//     sleeps FILE GIB
//
// FILE (a page on tmpfs): passes done (u64 @0), wrong words (u64 @16), stop (u32 @24, set by the test), error
// (u32 @28), sleep (u32 @32, set by the test: 1, then 0 to wake it), whether it sleeps (u32 @36).
#include <cuda.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

struct Page {
    volatile uint64_t passes, unused, wrong;
    volatile uint32_t stop, error, sleep, sleeps;
};

static Page *page;

#include "words.cuh"

#define CALL(name, ...)                                           \
    do {                                                          \
        CUresult code_ = name(__VA_ARGS__);                       \
        if (code_ != CUDA_SUCCESS) {                              \
            fprintf(stderr, "%s: error %d\n", #name, (int)code_); \
            page->error = code_;                                  \
            _exit(1);                                             \
        }                                                         \
    } while (0)

static const size_t BYTES = 1u << 30, WORDS = BYTES / 8;

static CUmemAllocationProp prop;

static CUmemGenericAllocationHandle make(CUdeviceptr address) {
    CUmemAccessDesc access = {};
    CUmemGenericAllocationHandle handle;
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CALL(cuMemCreate, &handle, BYTES, &prop, 0);
    CALL(cuMemMap, address, BYTES, 0, handle, 0);
    CALL(cuMemSetAccess, address, BYTES, &access, 1);
    return handle;
}

int main(int argc, char **argv) {
    const int count = argc > 2 ? atoi(argv[2]) : 0;
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
    CHECK(cudaFree(nullptr));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    std::vector<CUdeviceptr> address(count);
    std::vector<CUmemGenericAllocationHandle> handle(count);
    std::vector<uint64_t> kept(count * WORDS);
    unsigned long long *wrong;
    CHECK(cudaMalloc(&wrong, sizeof(*wrong)));
    CHECK(cudaMemset(wrong, 0, sizeof(*wrong)));
    for (int i = 0; i < count; i++) {
        CALL(cuMemAddressReserve, &address[i], BYTES, 0, 0, 0);
        handle[i] = make(address[i]);
        fill<<<1024, 256>>>((uint64_t *)address[i], WORDS, i);
    }
    for (uint64_t pass = 0; !page->stop; pass++) {
        for (int i = 0; i < count; i++) {
            work<<<1024, 256>>>((uint64_t *)address[i], WORDS);
            check<<<1024, 256>>>((uint64_t *)address[i], WORDS, i, pass + 1, wrong);
        }
        unsigned long long found;
        CHECK(cudaMemcpy(&found, wrong, sizeof(found), cudaMemcpyDeviceToHost));
        page->wrong = found;
        page->passes = pass + 1;
        if (!page->sleep)
            continue;
        for (int i = 0; i < count; i++) {
            CHECK(cudaMemcpy(&kept[i * WORDS], (void *)address[i], BYTES, cudaMemcpyDeviceToHost));
            CALL(cuMemUnmap, address[i], BYTES);
            CALL(cuMemRelease, handle[i]);
        }
        page->sleeps = 1;
        while (page->sleep && !page->stop)
            usleep(1000);
        for (int i = 0; i < count; i++) {
            handle[i] = make(address[i]);
            CHECK(cudaMemcpy((void *)address[i], &kept[i * WORDS], BYTES, cudaMemcpyHostToDevice));
        }
        page->sleeps = 0;
    }
    return 0;
}
