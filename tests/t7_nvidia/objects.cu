// A CUDA program that makes its memory by cuMemCreate and maps it itself, as PyTorch's expandable segments do: SEGMENTS
// of 20 MiB one after another, and each of them mapped a second time elsewhere. It works on all of it, compares both
// mappings, and in every tenth pass releases a quarter and makes it again.
//
//     objects FILE SEGMENTS (two at least)
//
// FILE (a page on tmpfs): passes done (u64 @0), words wrong (u64 @16), stop (u32 @24, set by the test), error
// (u32 @28). It says on its standard output what the driver says of a mapping: "NAME VALUE", or "NAME ERROR VALUE", a
// line each, before its first pass, and again at its end.
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
    volatile uint32_t stop, error;
};

static Page *page;

#include "words.cuh"

#define CALL(name, ...)                                             \
    do {                                                            \
        CUresult code_ = name(__VA_ARGS__);                         \
        if (code_ != CUDA_SUCCESS) {                                \
            fprintf(stderr, "%s: error %d\n", #name, (int)code_);   \
            page->error = code_;                                    \
            _exit(1);                                               \
        }                                                           \
    } while (0)

static const size_t SEGMENT = 20u << 20, WORDS = SEGMENT / 8, GRANULE = 2u << 20;

static CUmemAllocationProp prop;
static CUmemAccessDesc access_;

static CUmemGenericAllocationHandle make(CUdeviceptr one, CUdeviceptr other) {
    CUmemGenericAllocationHandle handle;
    CALL(cuMemCreate, &handle, SEGMENT, &prop, 0);
    CALL(cuMemMap, one, SEGMENT, 0, handle, 0);
    CALL(cuMemMap, other, SEGMENT, 0, handle, 0);
    return handle;
}

// Attributes whose answer, where it is an address in the mapping, is printed as an offset from the queried address.
static const struct { const char *name; CUpointer_attribute kind; bool is_address; } attributes[] = {
    { "memory_type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE, false },
    { "device_pointer", CU_POINTER_ATTRIBUTE_DEVICE_POINTER, true },
    { "host_pointer", CU_POINTER_ATTRIBUTE_HOST_POINTER, false },
    { "is_managed", CU_POINTER_ATTRIBUTE_IS_MANAGED, false },
    { "device_ordinal", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, false },
    { "legacy_ipc", CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, false },
    { "mapped", CU_POINTER_ATTRIBUTE_MAPPED, false },
    { "handle_types", CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, false },
    { "access", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, false },
    { "range_start", CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, true },
    { "range_size", CU_POINTER_ATTRIBUTE_RANGE_SIZE, false },
    { "mapping_start", CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, true },
    { "mapping_size", CU_POINTER_ATTRIBUTE_MAPPING_SIZE, false },
};

// Print what the driver says of the mapping of a segment at `offset`, and how it answers operations on it.
static void say(CUdeviceptr start, size_t offset, CUmemGenericAllocationHandle handle) {
    const CUdeviceptr at = start + offset;
    CUmemAllocationProp got = {};
    CUdeviceptr base = 0, spare;
    size_t size = 0;
    unsigned long long flags = 0;
    CUmemGenericAllocationHandle again;
    CALL(cuMemGetAllocationPropertiesFromHandle, &got, handle);
    printf("same_properties %d\n", got.location.id == prop.location.id &&
                                       got.requestedHandleTypes == prop.requestedHandleTypes &&
                                       got.allocFlags.gpuDirectRDMACapable == prop.allocFlags.gpuDirectRDMACapable);
    for (const auto &attribute : attributes) {
        unsigned long long value = 0;
        const CUresult code = cuPointerGetAttribute(&value, attribute.kind, at);
        printf("%s %d %llx\n", attribute.name, (int)code, attribute.is_address ? at - value : value);
    }
    CALL(cuMemGetAddressRange, &base, &size, at);
    printf("address_start %llx\naddress_size %zx\n", at - base, size);
    CALL(cuMemGetAccess, &flags, &prop.location, at);
    printf("has_access %llx\n", flags);
    CALL(cuMemRetainAllocationHandle, &again, (void *)at);
    printf("same_handle %d\n", again == handle);
    CALL(cuMemRelease, again);
    printf("part_unmapped %d\n", (int)cuMemUnmap(start, GRANULE));
    CALL(cuMemAddressReserve, &spare, GRANULE, 0, 0, 0);
    const CUresult mapped = cuMemMap(spare, GRANULE, GRANULE, handle, 0);
    printf("offset_mapped %d\n", (int)mapped);
    if (mapped == CUDA_SUCCESS)
        CALL(cuMemUnmap, spare, GRANULE);
    CALL(cuMemAddressFree, spare, GRANULE);
    fflush(stdout);
}

int main(int argc, char **argv) {
    const int segments = argc > 2 ? atoi(argv[2]) : 0;
    const size_t bytes = segments * SEGMENT;
    if (segments < 2)
        return 2;
    int file = open(argv[1], O_RDWR), capable = 0;
    size_t granule = 0;
    page = (Page *)mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(cudaFree(nullptr));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CALL(cuDeviceGetAttribute, &capable, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0);
    prop.allocFlags.gpuDirectRDMACapable = capable;
    CALL(cuMemGetAllocationGranularity, &granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (SEGMENT % granule || GRANULE % granule) {
        fprintf(stderr, "memory comes in granules of %zu bytes\n", granule);
        _exit(1);
    }
    access_.location = prop.location;
    access_.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    std::vector<CUmemGenericAllocationHandle> handles(segments);
    CUdeviceptr one, other;
    CALL(cuMemAddressReserve, &one, bytes, 0, 0, 0);
    CALL(cuMemAddressReserve, &other, bytes, 0, 0, 0);
    for (int i = 0; i < segments; i++)
        handles[i] = make(one + i * SEGMENT, other + i * SEGMENT);
    CALL(cuMemSetAccess, one, bytes, &access_, 1);
    CALL(cuMemSetAccess, other, bytes, &access_, 1);
    say(one + SEGMENT, GRANULE + 4096, handles[1]);
    unsigned long long *wrong;
    CHECK(cudaMallocManaged(&wrong, sizeof(*wrong)));
    *wrong = 0;
    std::vector<uint64_t> worked(segments, 0);
    for (int i = 0; i < segments; i++)
        fill<<<256, 256>>>((uint64_t *)(one + i * SEGMENT), WORDS, i);
    while (!page->stop) {
        for (int i = 0; i < segments; i++, worked[i - 1]++)
            work<<<256, 256>>>((uint64_t *)(one + i * SEGMENT), WORDS);
        for (int i = 0; i < segments; i++)
            check<<<256, 256>>>((uint64_t *)(other + i * SEGMENT), WORDS, i, worked[i], wrong);
        CHECK(cudaDeviceSynchronize());
        page->wrong = *wrong;
        if (++page->passes % 10)
            continue;
        for (int i = segments / 2; i < segments / 2 + segments / 4; i++) {
            CALL(cuMemUnmap, one + i * SEGMENT, SEGMENT);
            CALL(cuMemUnmap, other + i * SEGMENT, SEGMENT);
            CALL(cuMemRelease, handles[i]);
            handles[i] = make(one + i * SEGMENT, other + i * SEGMENT);
        }
        /* Over all of it, wherever each part is. */
        CALL(cuMemSetAccess, one, bytes, &access_, 1);
        CALL(cuMemSetAccess, other, bytes, &access_, 1);
        for (int i = segments / 2; i < segments / 2 + segments / 4; i++, worked[i - 1] = 0)
            fill<<<256, 256>>>((uint64_t *)(one + i * SEGMENT), WORDS, i);
    }
    CHECK(cudaDeviceSynchronize());
    say(one + SEGMENT, GRANULE + 4096, handles[1]);
    return 0;
}
