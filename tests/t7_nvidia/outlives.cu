// outlives - a program with memory of one kind, which is controlled before and after a checkpoint (outlives.py).
//
//   outlives KIND SOCKET
//
// At `prepare` on its standard input it does what its kind needs to be checkpointed; at `check` it does what its kind
// needs to get its data back, and checks every word of it from a kernel. It answers each line with one: `ready`, or
// what went wrong. SOCKET is a descriptor over which it sends others (SCM_RIGHTS), so that another process keeps
// exported memory.
#include <cuda.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

static const size_t SIZE = 256u << 20;
static const size_t WORDS = SIZE / sizeof(uint64_t);

struct Failed {
	std::string what;
};

#define CALL(name, ...)                                                                    \
	do {                                                                               \
		CUresult code_ = name(__VA_ARGS__);                                        \
		if (code_ != CUDA_SUCCESS)                                                 \
			throw Failed{std::string(#name) + " " + std::to_string(code_)};    \
	} while (0)

__global__ void fill(uint64_t *words, size_t count, uint64_t seed)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
		words[i] = seed + i * 0x9e3779b97f4a7c15ull;
}

__global__ void compare(const uint64_t *words, size_t count, uint64_t seed, unsigned long long *wrong)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
		if (words[i] != seed + i * 0x9e3779b97f4a7c15ull)
			atomicAdd(wrong, 1ull);
}

static CUdeviceptr plain;            // cuMemAlloc, with every kind
static CUdeviceptr other;            // memory of the kind
static CUmemGenericAllocationHandle handle;
static std::vector<char> copied;
static void *host;
static int exported = -1;
static std::string kind;
static int channel;

static bool is(const char *name)
{
	return kind == name;
}

/* Export and release the memory, so that all that is left in this process is a descriptor. */
static bool goes_out()
{
	return is("exported") || is("exported, kept by another") || is("of the other GPU");
}

static CUmemAllocationProp properties()
{
	CUmemAllocationProp prop = {};

	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.location.type = is("host") ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
	prop.location.id = is("of the other GPU") ? 1 : 0;
	prop.requestedHandleTypes = goes_out() || is("mapped, exportable") ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR :
									   CU_MEM_HANDLE_TYPE_NONE;
	return prop;
}

static void map()
{
	CUmemAccessDesc access = {};

	CALL(cuMemMap, other, SIZE, 0, handle, 0);
	access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	CALL(cuMemSetAccess, other, SIZE, &access, 1);
}

static void send_fd(int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
	iovec part = {&byte, 1};
	msghdr message = {};
	message.msg_iov = &part;
	message.msg_iovlen = 1;
	message.msg_control = control;
	message.msg_controllen = sizeof(control);
	cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &fd, sizeof(int));
	if (sendmsg(channel, &message, 0) != 1)
		throw Failed{"sendmsg"};
}

static int receive_fd()
{
	char byte, control[CMSG_SPACE(sizeof(int))];
	iovec part = {&byte, 1};
	msghdr message = {};
	int fd;
	message.msg_iov = &part;
	message.msg_iovlen = 1;
	message.msg_control = control;
	message.msg_controllen = sizeof(control);
	if (recvmsg(channel, &message, 0) != 1 || !CMSG_FIRSTHDR(&message))
		throw Failed{"recvmsg"};
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
	return fd;
}

static void make()
{
	CALL(cuMemAlloc, &plain, SIZE);
	if (is("plain"))
		return;
	if (is("pinned")) {
		CALL(cuMemHostAlloc, &host, SIZE, CU_MEMHOSTALLOC_DEVICEMAP);
		CALL(cuMemHostGetDevicePointer, &other, host, 0);
	} else if (is("registered")) {
		host = aligned_alloc(4096, SIZE);
		CALL(cuMemHostRegister, host, SIZE, CU_MEMHOSTREGISTER_DEVICEMAP);
		CALL(cuMemHostGetDevicePointer, &other, host, 0);
	} else if (is("pool")) {
		CALL(cuMemAllocAsync, &other, SIZE, 0);
		CALL(cuStreamSynchronize, 0);
	} else {
		CALL(cuMemAddressReserve, &other, SIZE, 0, 0, 0);
		if (is("reserved"))
			return;
		CUmemAllocationProp prop = properties();
		CALL(cuMemCreate, &handle, SIZE, &prop, 0);
		map();
	}
}

static void unmap()
{
	CALL(cuMemUnmap, other, SIZE);
}

static void prepare()
{
	if (is("copied out")) {
		copied.resize(SIZE);
		CALL(cuMemcpyDtoH, copied.data(), other, SIZE);
		unmap();
		CALL(cuMemRelease, handle);
	} else if (is("unmapped")) {
		unmap();
	} else if (goes_out()) {
		CALL(cuMemExportToShareableHandle, &exported, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
		unmap();
		CALL(cuMemRelease, handle);
		if (!is("exported")) {
			send_fd(exported);
			close(exported);
		}
	}
}

static void come_back()
{
	CUmemAllocationProp prop = properties();

	if (is("copied out")) {
		CALL(cuMemCreate, &handle, SIZE, &prop, 0);
		map();
		CALL(cuMemcpyHtoD, other, copied.data(), SIZE);
	} else if (is("reserved")) { // usable as it is
		CALL(cuMemCreate, &handle, SIZE, &prop, 0);
		map();
		fill<<<1024, 256>>>((uint64_t *)other, WORDS, 2);
	} else if (is("unmapped")) {
		map();
	} else if (goes_out()) {
		if (!is("exported"))
			exported = receive_fd();
		CALL(cuMemImportFromShareableHandle, &handle, (void *)(uintptr_t)exported,
		     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
		map();
	}
}

static void look(CUdeviceptr words, uint64_t seed, const char *which)
{
	CUdeviceptr wrong;
	unsigned long long count = 0;

	CALL(cuMemAlloc, &wrong, sizeof(count));
	CALL(cuMemsetD8, wrong, 0, sizeof(count));
	compare<<<1024, 256>>>((const uint64_t *)words, WORDS, seed, (unsigned long long *)wrong);
	CALL(cuMemcpyDtoH, &count, wrong, sizeof(count));
	CALL(cuMemFree, wrong);
	if (count)
		throw Failed{std::string(which) + ": " + std::to_string(count) + " words are wrong"};
}

int main(int argc, char **argv)
{
	char line[64];

	if (argc != 3)
		return 2;
	kind = argv[1];
	channel = atoi(argv[2]);
	try {
		CUcontext context;
		CALL(cuInit, 0);
		CALL(cuDevicePrimaryCtxRetain, &context, 0);
		CALL(cuCtxSetCurrent, context);
		make();
		fill<<<1024, 256>>>((uint64_t *)plain, WORDS, 1);
		if (other && !is("reserved"))
			fill<<<1024, 256>>>((uint64_t *)other, WORDS, 2);
		CALL(cuCtxSynchronize);
		puts("ready");
		fflush(stdout);
		while (fgets(line, sizeof(line), stdin)) {
			if (!strncmp(line, "prepare", 7)) {
				prepare();
			} else {
				look(plain, 1, "plain");
				come_back();
				if (other)
					look(other, 2, "other");
			}
			puts("ready");
			fflush(stdout);
		}
	} catch (const Failed &failed) {
		puts(failed.what.c_str());
		return 1;
	}
	return 0;
}
