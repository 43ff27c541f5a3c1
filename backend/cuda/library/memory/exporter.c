// SPDX-License-Identifier: Apache-2.0
/* The exporting side of legacy IPC: a thread that hands out descriptors of the chunks. */
#include "exporter.h"

#include <signal.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "chunk.h"
#include "driver.h"
#include "glibc.h"
#include "life.h"
#include "ours.h"
#include "pick.h"
#include "tree.h"

/* Seconds that one importing process has; others may wait behind it. */
#define PATIENCE 2

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t token, secret;	/* under `lock`; 0: no handle was given out yet */
static bool serving;		/* under `lock` */

static bool send_part(int socket, const struct ipc_part *part, const int *fds)
{
	struct iovec vector = { .iov_base = (void *)(uintptr_t)part, .iov_len = sizeof(*part) };
	union {
		char room[CMSG_SPACE(IPC_CHUNKS * sizeof(int))];
		struct cmsghdr align;
	} control = { 0 };
	struct msghdr header = { .msg_iov = &vector, .msg_iovlen = 1 };
	struct cmsghdr *rights;

	if (part->count) {
		header.msg_control = &control;
		header.msg_controllen = CMSG_SPACE(part->count * sizeof(int));
		rights = CMSG_FIRSTHDR(&header);
		rights->cmsg_level = SOL_SOCKET;
		rights->cmsg_type = SCM_RIGHTS;
		rights->cmsg_len = CMSG_LEN(part->count * sizeof(int));
		memcpy(CMSG_DATA(rights), fds, part->count * sizeof(int));
	}
	return sendmsg(socket, &header, MSG_NOSIGNAL) == sizeof(*part);
}

/* Hand out the chunks of a region from an offset on. Returns the bytes handed out, 0 for none. */
static uint64_t hand_out(int socket, const struct ipc_handle *asked, uint64_t offset)
{
	struct pick picks[IPC_CHUNKS];
	struct ipc_part part = { 0 };
	uint64_t bytes = 0;
	int fds[IPC_CHUNKS];
	size_t count = pick_shareable(asked->address + offset, asked->bytes - offset, asked->serial, true, picks,
					     IPC_CHUNKS);

	/* Busy chunks are not freed. */
	while (part.count < count) {
		const struct pick *pick = &picks[part.count];
		int fd = -1;

		/* A chunk is missing in between: another thread has it. */
		if (chunk_offset(pick->region, pick->index) != offset + bytes ||
		    real.cuMemExportToShareableHandle(&fd, pick->region->chunk[pick->index].memory,
						      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
			break;
		tree_lend(pick->region, fd);
		part.bytes[part.count] = chunk_bytes(pick->region, pick->index);
		fds[part.count] = fd;
		bytes += part.bytes[part.count++];
	}
	pick_put(picks, count);
	part.last = !part.count || offset + bytes == asked->bytes;
	if (!send_part(socket, &part, fds))
		bytes = 0;
	for (uint32_t i = 0; i < part.count; i++)
		close(fds[i]);
	return bytes;
}

static bool may_open(const struct ipc_handle *handle)
{
	pthread_mutex_lock(&lock);
	bool may = token == handle->token && secret == handle->secret;
	pthread_mutex_unlock(&lock);
	return may;
}

static void answer(int socket)
{
	const struct timeval patience = { .tv_sec = PATIENCE };
	struct ucred peer;
	socklen_t length = sizeof(peer);
	struct ipc_handle asked;
	uint64_t offset = 0, step;

	setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) || (peer.uid && peer.uid != geteuid()))
		return;
	if (recv(socket, &asked, sizeof(asked), MSG_TRUNC) != sizeof(asked) || !may_open(&asked) || !asked.bytes)
		return;
	do {
		step = hand_out(socket, &asked, offset);
		offset += step;
	} while (step && offset < asked.bytes);
}

static void *serve(void *argument)
{
	const int listener = (int)(intptr_t)argument;
	int socket;

	ours_enter();
	pthread_setname_np(pthread_self(), "ggroup-ipc");
	/* Until the program closes a descriptor that it does not know. */
	while ((socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
		answer(socket);
		close(socket);
	}
	pthread_mutex_lock(&lock);
	serving = false;
	pthread_mutex_unlock(&lock);
	return NULL;
}

/* With the lock held. */
static bool start(void)
{
	struct sockaddr_un address;
	sigset_t all, before;
	pthread_t thread;
	socklen_t length;
	int listener;

	if (!token && (glibc_random(&secret, sizeof(secret), 0) != sizeof(secret) ||
		       glibc_random(&token, sizeof(token), 0) != sizeof(token)))
		token = 0;
	listener = token ? socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0) : -1;
	if (listener < 0)
		return false;
	length = ipc_address(token, &address);
	if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, SOMAXCONN)) {
		close(listener);
		return false;
	}
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	serving = !pthread_create(&thread, NULL, serve, (void *)(intptr_t)listener);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (serving)
		pthread_detach(thread);
	else
		close(listener);
	return serving;
}

bool exporter_serve(struct ipc_handle *handle)
{
	pthread_mutex_lock(&lock);
	bool ready = serving || start();
	handle->token = token;
	handle->secret = secret;
	handle->pid = (uint32_t)getpid();
	handle->pid_namespace = ipc_pid_namespace();
	pthread_mutex_unlock(&lock);
	return ready;
}

bool exporter_own(uint64_t of)
{
	pthread_mutex_lock(&lock);
	bool own = token && token == of;
	pthread_mutex_unlock(&lock);
	return own;
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	token = secret = 0;	/* the parent's, as is the socket, of which no thread here accepts */
	serving = false;
}

LIFE(.stage = LIFE_FOREIGN, .forget = forget);
