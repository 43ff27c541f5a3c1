// SPDX-License-Identifier: Apache-2.0
/* Tests of lent.c: `outlives NAME` runs one on the double of the driver, with FAKE_LENT=1. */

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "carry.h"
#include "device.h"
#include "double.h"
#include "lent.h"
#include "library.h"
#include "pool.h"

#define PAGE GG_CHUNK
#define BYTES (18 * PAGE)

static struct device *device;

static void start(void)
{
	void *library;
	__typeof__(&cuDevicePrimaryCtxRetain) retain;
	CUcontext context;

	library_begin();
	CHECK(real.cuInit(0) == CUDA_SUCCESS);
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	retain = (__typeof__(retain))driver_dlsym(library, "cuDevicePrimaryCtxRetain");
	CHECK(retain(&context, 0) == CUDA_SUCCESS && real.cuCtxSetCurrent(context) == CUDA_SUCCESS);
	device = device_current();
	CHECK(device && device->elastic);
	device->mover->copy_us = device->mover->work_us = 60000000;	/* for a double made of threads */
}

/* Make memory that can be exported: an object of the library, or `fixed`, the driver's own. */
static CUmemGenericAllocationHandle create(bool fixed)
{
	CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
				     .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE },
				     .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };
	CUmemGenericAllocationHandle handle;

	prop.allocFlags.compressionType = fixed ? CU_MEM_ALLOCATION_COMP_GENERIC : 0;
	CHECK(cuMemCreate(&handle, BYTES, &prop, 0) == CUDA_SUCCESS);
	return handle;
}

static int export(CUmemGenericAllocationHandle handle)
{
	int fd = -1;

	CHECK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS);
	CHECK(fd >= 0);
	return fd;
}

/* Make memory, export and release it; return the descriptor. */
static int export_and_release(bool fixed)
{
	const CUmemGenericAllocationHandle handle = create(fixed);
	const int fd = export(handle);

	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	return fd;
}

static int name(CUdeviceptr address, size_t bytes)
{
	int fd = -1;

	CHECK(cuMemGetHandleForAddressRange(&fd, address, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) ==
	      CUDA_SUCCESS);
	CHECK(fd >= 0);
	return fd;
}

static void check_charged(uint64_t bytes)
{
	lent_sweep();
	CHECK(device->lent == bytes && device->foreign == bytes && device->resident - pool_kept(device) == bytes);
	double_agree(device);
}

/* Each descriptor of it counts, wherever it is. */
static void until_closed(bool fixed)
{
	const CUmemGenericAllocationHandle handle = create(fixed);
	CUdeviceptr address;
	int first, second, third;

	CHECK(cuMemAddressReserve(&address, BYTES, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cuMemMap(address, BYTES, 0, handle, 0) == CUDA_SUCCESS);
	CHECK(fixed || double_out(device, UINT64_MAX) == BYTES);
	first = export(handle);
	second = export(handle);
	third = fcntl(first, F_DUPFD_CLOEXEC, 100);
	close(first);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS && device->lent == 0);
	CHECK(cuMemUnmap(address, BYTES) == CUDA_SUCCESS);
	check_charged(BYTES);
	close(third);
	check_charged(BYTES);
	close(second);
	check_charged(0);
}

static void test_object(void)
{
	start();
	until_closed(false);
	until_closed(false);
}

static void test_fixed(void)
{
	start();
	until_closed(true);
	until_closed(true);
}

/* Memory without an open descriptor is freed at once. */
static void test_closed_before(void)
{
	CUmemGenericAllocationHandle handle;

	start();
	for (int fixed = 0; fixed < 2; fixed++) {
		handle = create(fixed);
		close(export(handle));
		CHECK(cuMemRelease(handle) == CUDA_SUCCESS && device->lent == 0);
		check_charged(0);
	}
}

/* A descriptor is in no process while it is on its way to one. */
static void test_in_flight(void)
{
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct iovec part = { "", 1 };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				 .msg_controllen = sizeof(control) };
	struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
	int sockets[2], fd;

	start();
	fd = export_and_release(false);
	rights->cmsg_level = SOL_SOCKET;
	rights->cmsg_type = SCM_RIGHTS;
	rights->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(rights), &fd, sizeof(int));
	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets));
	CHECK(sendmsg(sockets[0], &header, 0) == 1);
	close(fd);
	check_charged(BYTES);
	close(sockets[0]);
	close(sockets[1]);
	check_charged(0);
}

static void test_process(void)
{
	int fd, status;
	pid_t child;

	start();
	fd = export_and_release(false);
	CHECK(!fcntl(fd, F_SETFD, 0));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		execlp("sleep", "sleep", "600", NULL);
		_exit(127);
	}
	close(fd);
	check_charged(BYTES);
	CHECK(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
	check_charged(0);
}

/* Check that memory is charged, and that this process has it. */
static void check_own(uint64_t bytes)
{
	lent_sweep();
	CHECK(device->lent == 0 && device->foreign == bytes && device->resident - pool_kept(device) == bytes);
	double_agree(device);
}

/* Import memory that the program has exported itself: it may let go of all else. `as`: number of the descriptor. */
static void import_own(bool fixed, int as, bool before)
{
	const CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE },
					 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle = create(fixed), imported;
	int fd = export(handle), other = as ? fcntl(fd, F_DUPFD_CLOEXEC, as) : fd;
	CUdeviceptr address;

	if (!before) {
		CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
		check_charged(BYTES);
	}
	CHECK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)other,
					     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS);
	close(fd);
	if (other != fd)
		close(other);
	if (before) {
		check_own(BYTES);
		CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	}
	check_own(BYTES);
	CHECK(cuMemAddressReserve(&address, BYTES, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cuMemMap(address, BYTES, 0, imported, 0) == CUDA_SUCCESS);
	CHECK(cuMemSetAccess(address, BYTES, &access, 1) == CUDA_SUCCESS);
	CHECK(cuMemRelease(imported) == CUDA_SUCCESS);
	check_own(BYTES);
	CHECK(cuMemUnmap(address, BYTES) == CUDA_SUCCESS && cuMemAddressFree(address, BYTES) == CUDA_SUCCESS);
	check_own(0);
}

static void test_imported(void)
{
	start();
	for (int fixed = 0; fixed < 2; fixed++)
		for (int as = 0; as <= 100; as += 100) {
			import_own(fixed, as, true);
			import_own(fixed, as, false);
		}
}

/* A descriptor names memory where its import is mapped, and outlives both: first the import goes, then all else. */
static void test_imported_and_named(void)
{
	CUmemGenericAllocationHandle handle, imported;
	CUdeviceptr address;
	int fd, named;

	start();
	handle = create(true);
	fd = export(handle);
	CHECK(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd,
					     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == CUDA_SUCCESS);
	close(fd);
	CHECK(cuMemAddressReserve(&address, BYTES, 0, 0, 0) == CUDA_SUCCESS);
	CHECK(cuMemMap(address, BYTES, 0, imported, 0) == CUDA_SUCCESS);
	CHECK(cuMemRelease(imported) == CUDA_SUCCESS);
	named = name(address, BYTES);
	CHECK(cuMemUnmap(address, BYTES) == CUDA_SUCCESS && cuMemAddressFree(address, BYTES) == CUDA_SUCCESS);
	check_own(BYTES);
	CHECK(cuMemRelease(handle) == CUDA_SUCCESS);
	check_charged(BYTES);
	close(named);
	check_charged(0);
}

/* Memory that a descriptor names is given to no other allocation either. */
static void test_named(void)
{
	CUdeviceptr address;
	int fd;

	start();
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS);
	fd = name(address, BYTES);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	check_charged(BYTES);
	CHECK(pool_kept(device) == 0);
	close(fd);
	check_charged(0);
}

/* The same memory is also given to other processes. */
static void test_named_and_shared(void)
{
	CUipcMemHandle handle;
	CUdeviceptr address;
	int fd;

	start();
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS);
	fd = name(address, BYTES);
	CHECK(cuIpcGetMemHandle(&handle, address) == CUDA_SUCCESS);
	double_agree(device);
	CHECK(device->lent == 0);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	check_charged(BYTES);
	close(fd);
	check_charged(0);
}

/* One descriptor names several pieces that are mapped side by side. */
static void test_named_together(void)
{
	CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE },
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handles[3];
	CUdeviceptr address;
	int fd;

	start();
	CHECK(cuMemAddressReserve(&address, 3 * BYTES, 0, 0, 0) == CUDA_SUCCESS);
	for (int i = 0; i < 3; i++) {
		handles[i] = create(false);
		CHECK(cuMemMap(address + i * BYTES, BYTES, 0, handles[i], 0) == CUDA_SUCCESS);
	}
	CHECK(cuMemSetAccess(address, 3 * BYTES, &access, 1) == CUDA_SUCCESS);
	fd = name(address, 3 * BYTES);
	for (int i = 0; i < 3; i++) {
		CHECK(cuMemUnmap(address + i * BYTES, BYTES) == CUDA_SUCCESS &&
		      cuMemRelease(handles[i]) == CUDA_SUCCESS);
		CHECK(device->lent == (i + 1) * BYTES);
	}
	check_charged(3 * BYTES);
	close(fd);
	check_charged(0);
}

/* The program has closed a descriptor that the library holds, and exports under its number: that is not the
 * library's. */
static void test_held_no_more(void)
{
	CUmemGenericAllocationHandle handle;
	int held, fd;

	start();
	handle = create(true);
	held = lent_hold(export(handle));
	CHECK(held >= 0);
	close(held);
	fd = export(handle);
	CHECK(fd == held);
	lent_let(held);
	CHECK(fcntl(fd, F_GETFD) >= 0 && cuMemRelease(handle) == CUDA_SUCCESS);
	check_charged(BYTES);
	close(fd);
	check_charged(0);
}

/* A program closes descriptors that it does not know, as a daemon does. Their numbers may then be other files'. */
static void test_closes_all(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	int fd, sets[64];

	start();
	close(export_and_release(false));
	closefrom(3);
	for (int i = 0; i < 64; i++)
		sets[i] = epoll_create1(0);
	fd = export_and_release(false);
	lent_sweep();
	CHECK(device->lent == BYTES);
	for (int i = 0; i < 64; i++)
		CHECK(epoll_wait(sets[i], &event, 1, 0) == 0);
	close(fd);
	for (int i = 0; i < 64; i++)
		CHECK(epoll_wait(sets[i], &event, 1, 0) == 0);
	/* The double has lost its own descriptors, too. */
	lent_sweep();
	CHECK(device->lent == 0 && device->resident == pool_kept(device));
}

/* Run the other process, with a socket to this one: open what it is sent, and close it when told to. */
static void peer(void)
{
	const int socket = atoi(getenv("UNIT_PEER"));
	CUipcMemHandle handle;
	CUdeviceptr address;
	char byte = 0;

	start();
	CHECK(recv(socket, &handle, sizeof(handle), 0) == sizeof(handle));
	CHECK(cuIpcOpenMemHandle_v2(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_SUCCESS);
	CHECK(send(socket, &byte, 1, 0) == 1 && recv(socket, &byte, 1, 0) == 1);
	CHECK(cuIpcCloseMemHandle(address) == CUDA_SUCCESS);
	CHECK(send(socket, &byte, 1, 0) == 1 && recv(socket, &byte, 1, 0) == 0);
}

static void test_opened(void)
{
	int sockets[2], status;
	char number[16], byte = 0;
	CUipcMemHandle handle;
	CUdeviceptr address;
	pid_t child;

	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets));
	snprintf(number, sizeof(number), "%d", sockets[1]);
	CHECK(!setenv("UNIT_PEER", number, 1));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		close(sockets[0]);
		execl("/proc/self/exe", "outlives", "peer", NULL);
		_exit(127);
	}
	close(sockets[1]);
	start();
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS && cuIpcGetMemHandle(&handle, address) == CUDA_SUCCESS);
	CHECK(send(sockets[0], &handle, sizeof(handle), 0) == sizeof(handle) && recv(sockets[0], &byte, 1, 0) == 1);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
	lent_sweep();
	CHECK(device->lent == BYTES && device->resident - pool_kept(device) == BYTES);
	CHECK(send(sockets[0], &byte, 1, 0) == 1 && recv(sockets[0], &byte, 1, 0) == 1);
	/* The thread that handed out the descriptor may not have closed its own yet. */
	while (__atomic_load_n(&device->lent, __ATOMIC_RELAXED)) {
		sched_yield();
		lent_sweep();
	}
	check_charged(0);
	close(sockets[0]);
	CHECK(waitpid(child, &status, 0) == child && !status);
}

/* It stands in the way of an allocation for as long as it lives, and no longer. */
static void test_limit(void)
{
	CUdeviceptr address;
	int fd;

	start();
	double_swap(false);
	fd = export_and_release(false);
	double_limit(BYTES + PAGE);
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_ERROR_OUT_OF_MEMORY);
	close(fd);
	CHECK(cuMemAlloc_v2(&address, BYTES) == CUDA_SUCCESS);
	CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} tests[] = {
		{ "object", test_object }, { "fixed", test_fixed }, { "closed_before", test_closed_before },
		{ "in_flight", test_in_flight }, { "process", test_process }, { "imported", test_imported },
		{ "named", test_named },
		{ "named_and_shared", test_named_and_shared }, { "imported_and_named", test_imported_and_named },
		{ "named_together", test_named_together }, { "closes_all", test_closes_all },
		{ "held_no_more", test_held_no_more }, { "limit", test_limit },
		{ "opened", test_opened }, { "peer", peer },
	};

	for (size_t i = 0; argc == 2 && i < sizeof(tests) / sizeof(tests[0]); i++)
		if (!strcmp(argv[1], tests[i].name)) {
			tests[i].run();
			return 0;
		}
	fprintf(stderr, "outlives NAME\n");
	return 2;
}
