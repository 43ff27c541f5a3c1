// SPDX-License-Identifier: Apache-2.0
/* The importing side of legacy IPC, which opens memory of another process (ipc.h). */
#include "importer.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "detour.h"
#include "driver.h"
#include "exporter.h"
#include "lent.h"
#include "life.h"
#include "log.h"

/* Seconds that the exporting process has: for each message, and in all for those of the first GiB and of each further
 * one. A running process needs milliseconds, but may have to answer other importers first. */
#define PATIENCE 5

/* Opened memory. */
struct import {
	struct import *next;
	struct ipc_handle handle;
	CUcontext context;
	CUdeviceptr address;
	uint64_t mapped;	/* bytes mapped so far */
	int held;		/* one of its descriptors, so that the exporting process is charged for it; -1: none */
	unsigned int opened;	/* times that it was opened */
};

/* Held while memory is opened: across calls of the driver, and to the other process. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct import *imports;

static time_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec;
}

/* Return whether to try again after a signal of the program. */
static bool again(time_t until)
{
	return errno == EINTR && now() <= until;
}

/* Return whether the listening process is the one that the handle names (ipc.h). */
static bool is_exporter(int socket, const struct ipc_handle *handle)
{
	const uint32_t here = ipc_pid_namespace();
	const bool comparable = handle->pid && (!here || !handle->pid_namespace || here == handle->pid_namespace);
	struct ucred peer;
	socklen_t length = sizeof(peer);

	if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length))
		return false;
	if (comparable && (uint32_t)peer.pid != handle->pid)
		return false;
	return !peer.uid || peer.uid == geteuid() || (!geteuid() && comparable);
}

static bool ask(int socket, const struct ipc_handle *handle, time_t until)
{
	const struct timeval patience = { .tv_sec = PATIENCE };
	struct sockaddr_un address;
	socklen_t length = ipc_address(handle->token, &address);
	ssize_t done;

	setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	do
		done = connect(socket, (struct sockaddr *)&address, length);
	while (done && again(until));
	if (done)
		return false;
	if (!is_exporter(socket, handle)) {
		log_line("it is not process %u that listens at the socket of its memory", handle->pid);
		return false;
	}
	do
		done = send(socket, handle, sizeof(*handle), MSG_NOSIGNAL);
	while (done < 0 && again(until));
	return done == sizeof(*handle);
}

/* Receive the descriptors of one message; returns their number. The part has no chunks unless the message is whole,
 * with exactly one descriptor for each chunk. */
static size_t receive(int socket, struct ipc_part *part, int *fds, time_t until)
{
	struct iovec vector = { .iov_base = part, .iov_len = sizeof(*part) };
	union {
		char room[CMSG_SPACE(IPC_CHUNKS * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct msghdr header = {
		.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control),
	};
	struct cmsghdr *rights;
	size_t count = 0;
	ssize_t got;

	memset(part, 0, sizeof(*part));
	do
		got = recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
	while (got < 0 && again(until));
	if (got < 0)
		return 0;
	rights = CMSG_FIRSTHDR(&header);
	if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
		count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		memcpy(fds, CMSG_DATA(rights), count * sizeof(int));
	}
	/* The room is for IPC_CHUNKS: the kernel drops further descriptors, and sets MSG_CTRUNC. */
	if (got != sizeof(*part) || header.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || part->count != count)
		part->count = 0;
	return count;
}

/* Map one chunk behind the mapped ones; false where that fails. */
static bool map_chunk(struct import *import, int fd, uint64_t bytes)
{
	CUmemGenericAllocationHandle memory;
	bool mapped;

	if (!bytes || bytes > import->handle.bytes - import->mapped ||
	    real.cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd,
						CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
		return false;
	mapped = real.cuMemMap(import->address + import->mapped, bytes, 0, memory, 0) == CUDA_SUCCESS;
	real.cuMemRelease(memory);	/* it lives as long as it is mapped */
	import->mapped += mapped ? bytes : 0;
	return mapped;
}

static bool map_all(struct import *import, int socket, time_t until)
{
	struct ipc_part part;
	int fds[IPC_CHUNKS];
	bool good;

	do {
		size_t count = receive(socket, &part, fds, until);

		good = part.count;
		for (size_t i = 0; i < count; i++) {
			good = good && map_chunk(import, fds[i], part.bytes[i]);
			if (good && import->held < 0)
				import->held = lent_hold(fds[i]);
			else
				close(fds[i]);
		}
	} while (good && !part.last && now() <= until);
	return good && import->mapped == import->handle.bytes;
}

static void drop(struct import *import)
{
	if (import->mapped && real.cuMemUnmap(import->address, import->mapped) != CUDA_SUCCESS)
		log_line("imported memory stays mapped at %llx", import->address);
	else if (import->address)
		real.cuMemAddressFree(import->address, import->handle.bytes);
	lent_let(import->held);
	free(import);
}

static struct import *import(const struct ipc_handle *handle, CUcontext context, CUdevice device)
{
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	struct import *made = calloc(1, sizeof(*made));
	const time_t until = now() + PATIENCE + PATIENCE * (time_t)(handle->bytes >> 30);
	int socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	bool good = made && socket_ >= 0 && ask(socket_, handle, until);

	if (made)
		made->held = -1;
	if (good) {
		made->handle = *handle;
		made->context = context;
		good = real.cuMemAddressReserve(&made->address, handle->bytes, 0, 0, 0) == CUDA_SUCCESS &&
		       map_all(made, socket_, until) &&
		       real.cuMemSetAccess(made->address, handle->bytes, &access, 1) == CUDA_SUCCESS;
	}
	if (socket_ >= 0)
		close(socket_);
	if (good)
		return made;
	if (made)
		drop(made);
	return NULL;
}

CUresult importer_open(CUdeviceptr *address, const struct ipc_handle *handle)
{
	CUcontext context = driver_context();
	struct import *at;
	CUdevice device;

	if (!context || real.cuCtxGetDevice(&device))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (exporter_own(handle->token))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (handle->offset >= handle->bytes || handle->bytes % GG_CHUNK)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&lock);
	for (at = imports; at; at = at->next)
		if (at->context == context && !memcmp(&at->handle, handle, offsetof(struct ipc_handle, offset)))
			break;
	if (!at) {
		at = import(handle, context, device);
		if (at) {
			at->next = imports;
			imports = at;
		}
	}
	if (at) {
		at->opened++;
		*address = at->address + handle->offset;
	}
	pthread_mutex_unlock(&lock);
	return at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool holds(const struct import *import, CUdeviceptr address)
{
	return address >= import->address && address - import->address < import->handle.bytes;
}

bool importer_close(CUdeviceptr address)
{
	CUstreamCaptureMode mode;
	struct import **at, *found;

	pthread_mutex_lock(&lock);
	for (at = &imports; *at && !holds(*at, address);)
		at = &(*at)->next;
	found = *at;
	if (found && !--found->opened)
		*at = found->next;
	pthread_mutex_unlock(&lock);
	if (!found)
		return false;
	if (found->opened)
		return true;
	/* As the driver does: work that uses the memory ends first. */
	mode = driver_enter();
	if (detour_on())
		detour_home_context(driver_context());
	real.cuCtxSynchronize();
	drop(found);
	driver_leave(mode);
	return true;
}

bool importer_any(void)
{
	bool any = true;

	if (!pthread_mutex_trylock(&lock)) {
		any = imports != NULL;
		pthread_mutex_unlock(&lock);
	}
	return any;
}

static void context_gone(struct device *device, CUcontext context)
{
	struct import **at = &imports, *gone;

	(void)device;
	pthread_mutex_lock(&lock);
	while ((gone = *at)) {
		if (gone->context == context) {
			*at = gone->next;
			drop(gone);
		} else {
			at = &gone->next;
		}
	}
	pthread_mutex_unlock(&lock);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	imports = NULL;
}

LIFE(.stage = LIFE_FOREIGN, .context_gone = context_gone, .forget = forget);
