// SPDX-License-Identifier: Apache-2.0
/* ipc: one process exports memory by legacy IPC, and others, which run this program as well, open it. */

#include "common.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>

#define BYTES (20 << 20)
#define SMALL 4000

KERNEL(add_one, sizeof(CUdeviceptr), sizeof(size_t));
void add_one(void **parameters)
{
	uint64_t *words = *(uint64_t **)parameters[0];

	for (size_t i = 0; i < *(size_t *)parameters[1]; i++)
		words[i]++;
}

static uint64_t data[BYTES / 8];

/* Return the bytes of physical memory that exist on the device. */
static void usage(int device, uint64_t *gpu)
{
	void (*ask)(int, uint64_t *, uint64_t *, uint64_t *);
	uint64_t host, addresses;

	ask = (void (*)(int, uint64_t *, uint64_t *, uint64_t *))dlsym(RTLD_DEFAULT, "fake_memory_usage");
	CHECK(ask);
	ask(device, gpu, &host, &addresses);
}

static void expect(CUdeviceptr address, size_t bytes, uint64_t first)
{
	DO(cuMemcpyDtoH_v2(data, address, bytes));
	for (size_t i = 0; i < bytes / 8; i++)
		CHECK(data[i] == first + i);
}

static void put(CUdeviceptr address, size_t bytes, uint64_t first)
{
	for (size_t i = 0; i < bytes / 8; i++)
		data[i] = first + i;
	DO(cuMemcpyHtoD_v2(address, data, bytes));
}

static void work(CUdeviceptr address, size_t bytes)
{
	size_t count = bytes / 8;
	void *parameters[] = { &address, &count };

	DO(cuLaunchKernel(function("add_one"), 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	DO(cuCtxSynchronize());
}

static void interrupted(int number)
{
	(void)number;
}

/* The other process. `words` are a handle in hexadecimal digits, the first word of the memory ("" for a handle that is
 * no longer valid), and its size. */
static int other(char **words)
{
	const bool gone = !*words[1];
	const struct sigaction action = { .sa_handler = interrupted };	/* no SA_RESTART */
	const size_t bytes = strtoul(words[2], NULL, 10);
	CUipcMemHandle handle;
	CUdeviceptr address, again;

	for (size_t i = 0; i < sizeof(handle); i++) {
		unsigned int byte;

		CHECK(sscanf(words[0] + 2 * i, "%2x", &byte) == 1);
		handle.reserved[i] = (char)byte;
	}
	CHECK(!sigaction(SIGUSR1, &action, NULL));
	start(0);
	EXPECT(gone ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS, cuIpcOpenMemHandle_v2(&address, handle, 1));
	if (gone)
		return 0;
	expect(address, bytes, strtoul(words[1], NULL, 10));
	DO(cuIpcOpenMemHandle_v2(&again, handle, 1));
	CHECK(again == address);
	handle.reserved[16] ^= 1;	/* without the secret the open fails, even if the memory is open */
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle_v2(&again, handle, 1));
	handle.reserved[16] ^= 1;
	DO(cuIpcCloseMemHandle(address));
	work(address, bytes);	/* still open */
	DO(cuIpcCloseMemHandle(address));
	DO(cuIpcOpenMemHandle_v2(&address, handle, 1));
	return 0;	/* left open */
}

static void run_other(const char *self, const CUipcMemHandle *handle, const char *first, size_t bytes)
{
	char hex[2 * sizeof(*handle) + 1], size[24];
	int status;
	pid_t child;

	for (size_t i = 0; i < sizeof(*handle); i++)
		snprintf(hex + 2 * i, 3, "%02x", (unsigned char)handle->reserved[i]);
	snprintf(size, sizeof(size), "%zu", bytes);
	child = fork();
	if (!child) {
		execl(self, self, hex, first, size, NULL);
		_exit(99);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Fill the GPU except for freed memory that the library keeps: an export takes that. */
static void export_when_full(void)
{
	uint64_t gpu, full;
	CUdeviceptr exported, freed, unused;
	CUipcMemHandle handle;

	DO(cuMemAlloc_v2(&exported, BYTES));
	DO(cuMemAlloc_v2(&freed, BYTES));
	for (size_t bytes = 64 << 20; bytes >= 2 << 20;)
		if (cuMemAlloc_v2(&unused, bytes) != CUDA_SUCCESS)
			bytes /= 2;
	usage(0, &full);
	DO(cuMemFree_v2(freed));
	usage(0, &gpu);
	CHECK(gpu == full);
	put(exported, BYTES, 1);
	DO(cuIpcGetMemHandle(&handle, exported));
	expect(exported, BYTES, 1);
}

int main(int argc, char **argv)
{
	uint64_t gpu, before;
	CUipcMemHandle large_handle, small_handle, same;
	CUdeviceptr large, small, unused;

	if (argc == 4)
		return other(argv + 1);
	start(0);
	DO(cuMemAlloc_v2(&unused, SMALL));
	DO(cuMemAlloc_v2(&small, SMALL));
	DO(cuMemAlloc_v2(&large, BYTES));
	put(large, BYTES, 1000);
	put(small, SMALL, 7);
	usage(0, &before);
	DO(cuIpcGetMemHandle(&large_handle, large));
	DO(cuIpcGetMemHandle(&same, large + 100));
	CHECK(!memcmp(&same, &large_handle, sizeof(same)));
	DO(cuIpcGetMemHandle(&small_handle, small));
	usage(0, &gpu);
	CHECK(gpu == before);
	expect(large, BYTES, 1000);
	EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle_v2(&unused, large_handle, 1));
	run_other(argv[0], &large_handle, "1000", BYTES);
	run_other(argv[0], &small_handle, "7", SMALL);
	expect(large, BYTES, 1001);	/* the others have worked on it */
	expect(small, SMALL, 8);
	memcpy(&same, &large_handle, sizeof(same));
	same.reserved[16] ^= 1;	/* a stranger may have read the name of the socket, but not the secret */
	run_other(argv[0], &same, "", BYTES);
	run_other(argv[0], &large_handle, "1001", BYTES);
	expect(large, BYTES, 1002);
	DO(cuMemFree_v2(large));
	usage(0, &gpu);
	CHECK(gpu == before - BYTES);	/* not kept, since another process may have it mapped */
	run_other(argv[0], &large_handle, "", BYTES);
	DO(cuMemAlloc_v2(&large, BYTES));
	run_other(argv[0], &large_handle, "", BYTES);	/* whatever is at the address now */
	export_when_full();
	return 0;
}
