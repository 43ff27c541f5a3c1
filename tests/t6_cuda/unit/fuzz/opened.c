// SPDX-License-Identifier: Apache-2.0
#include "opened.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"
#include "model.h"
#include "steps.h"

/* Exports of the other process: one of several chunks, and one that shares a chunk. */
#define EXPORTS 2
/* Number of times that one is open at once. */
#define OPEN_MOST 3

/* Message about memory from one process to the other: its handle, and the word at an offset in it. */
struct told {
	CUipcMemHandle handle;
	size_t offset;
	uint64_t word;
};

static int peer = -1;	/* socket to the other process */
static pid_t process;
static struct told theirs[EXPORTS];
static struct {
	CUdeviceptr address;	/* 0: not open */
	struct told *of;
} opened[OPEN_MOST];

static void send_all(int socket, const void *bytes, size_t count)
{
	CHECK(send(socket, bytes, count, MSG_NOSIGNAL) == (ssize_t)count);
}

static bool receive_all(int socket, void *bytes, size_t count)
{
	ssize_t got;

	do
		got = recv(socket, bytes, count, 0);
	while (got < 0 && errno == EINTR);
	return got == (ssize_t)count;
}

static void check_word(CUdeviceptr address, const struct told *told)
{
	uint64_t word = 0;

	CHECK(cuMemcpyDtoH_v2(&word, address + told->offset, sizeof(word)) == CUDA_SUCCESS && word == told->word);
}

/* The other process */

static struct told new_export(size_t bytes, uint64_t word)
{
	struct told told = { .offset = bytes - 8, .word = word };
	CUdeviceptr address;

	CHECK(cuMemAlloc_v2(&address, bytes) == CUDA_SUCCESS);
	CHECK(cuMemcpyHtoD_v2(address + told.offset, &word, sizeof(word)) == CUDA_SUCCESS);
	CHECK(cuIpcGetMemHandle(&told.handle, address) == CUDA_SUCCESS);
	return told;
}

void opened_peer(void)
{
	const int socket = atoi(getenv("UNIT_PEER"));
	const struct told ours[EXPORTS] = { new_export(10 * PAGE + 512, 77), new_export(4000, 78) };
	struct told told;
	CUdeviceptr address;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	send_all(socket, ours, sizeof(ours));
	for (uint64_t round = 0; receive_all(socket, &told, sizeof(told)); round++) {
		if (round % 2)
			CHECK(cuIpcOpenMemHandle(&address, told.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
			      CUDA_SUCCESS);
		else
			CHECK(cuIpcOpenMemHandle_v2(&address, told.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) ==
			      CUDA_SUCCESS);
		check_word(address, &told);
		CHECK(cuIpcCloseMemHandle(address) == CUDA_SUCCESS);
		send_all(socket, &round, sizeof(round));
	}
}

/* This process */

/* Called before anything else: a child of fork() uses nothing of what it inherits before it executes a program. */
void opened_start(void)
{
	int sockets[2];
	char number[16];

	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets));
	snprintf(number, sizeof(number), "%d", sockets[1]);
	CHECK(!setenv("UNIT_PEER", number, 1));
	process = fork();
	CHECK(process >= 0);
	if (!process) {
		close(sockets[0]);
		execl("/proc/self/exe", "objects", "peer", NULL);
		_exit(127);
	}
	close(sockets[1]);
	peer = sockets[0];
	CHECK(receive_all(peer, theirs, sizeof(theirs)));
}

static bool has_word(const struct plain *plain)
{
	return plain->kind == PLAIN && (plain->tail || plain->contents.written[0]);
}

/* Give an allocation to the other process, which opens and checks it. */
void opened_give(void)
{
	struct plain *plain = model_plain_that(has_word);
	struct told told = { 0 };
	uint64_t answer;

	if (!plain)
		return;
	DO(cuIpcGetMemHandle, (&told.handle, plain->address));
	told.offset = plain->tail ? plain->bytes - 8 : 0;
	told.word = plain->tail ? plain->tail : plain->contents.word[0];
	plain->stays = true;
	send_all(peer, &told, sizeof(told));
	CHECK(receive_all(peer, &answer, sizeof(answer)));
}

void opened_open(void)
{
	struct told *told = &theirs[model_any(EXPORTS)];

	for (int i = 0; i < OPEN_MOST; i++) {
		if (opened[i].address)
			continue;
		if (model_any(2))
			DO(cuIpcOpenMemHandle, (&opened[i].address, told->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
		else
			DO(cuIpcOpenMemHandle_v2,
			   (&opened[i].address, told->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
		opened[i].of = told;
		check_word(opened[i].address, told);
		return;
	}
}

void opened_close(void)
{
	size_t i = 0;

	while (i < OPEN_MOST && !opened[i].address)
		i++;
	if (i == OPEN_MOST)
		return;
	check_word(opened[i].address, opened[i].of);
	DO(cuIpcCloseMemHandle, (opened[i].address));
	opened[i].address = 0;
}

void opened_end(void)
{
	int status;

	for (size_t i = 0; i < OPEN_MOST; i++)
		if (opened[i].address)
			DO(cuIpcCloseMemHandle, (opened[i].address));
	close(peer);
	CHECK(waitpid(process, &status, 0) == process && !status);
}
