// SPDX-License-Identifier: Apache-2.0
#include "departure.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "batch.h"
#include "counters.h"
#include "driver.h"
#include "foreign.h"
#include "gate.h"
#include "ipc.h"
#include "pool.h"
#include "tree.h"

/* For how long the gate may be closed until nobody is inside, and until nobody is at any chunk, ms. */
#define GATE_MS 500
#define CHUNKS_MS 500
/* What undoes something is tried so often. */
#define TRIES 3

/* A chunk, and how far it is. */
struct parked {
	int fd;			/* -1: not yet, or it is left to the driver */
	bool unmapped;		/* from its region */
	bool shut;		/* ... and from its window */
	bool barred;		/* ... where nobody may use it */
	bool released;
	bool back;		/* it is mapped again */
};

struct leaving {
	struct device *device;
	struct pick *picks;
	struct parked *parked;
	size_t count;
};

/* Of the listening thread; all of it is zero but while a program stands by. */
static struct {
	struct leaving leaving[GG_ORDINALS];
	size_t devices;		/* in there; all of them are locked */
	size_t borrowed;	/* the first of them */
	bool kept;		/* no other device is set up */
	bool closed;		/* the gate is */
	bool more_files;	/* than before, may be open */
	struct rlimit files;
	bool begun;
} departure;

static struct chunk *chunk_of(const struct leaving *leaving, size_t i)
{
	return &leaving->picks[i].region->chunk[leaving->picks[i].index];
}

static CUdeviceptr address_of(const struct leaving *leaving, size_t i)
{
	return leaving->picks[i].region->address + chunk_offset(leaving->picks[i].region, leaving->picks[i].index);
}

static size_t bytes_of(const struct leaving *leaving, size_t i)
{
	return chunk_bytes(leaving->picks[i].region, leaving->picks[i].index);
}

/* Going */

static void join(struct device *device, void *unused)
{
	(void)unused;
	if (device->mover && device->pool && device->regions)
		departure.leaving[departure.devices++].device = device;
}

/* Each chunk takes a descriptor. */
static void allow_files(void)
{
	struct rlimit most;

	if (getrlimit(RLIMIT_NOFILE, &departure.files) || departure.files.rlim_cur == departure.files.rlim_max)
		return;
	most = (struct rlimit){ departure.files.rlim_max, departure.files.rlim_max };
	departure.more_files = !setrlimit(RLIMIT_NOFILE, &most);
}

/* All chunks of a device, for us alone. */
static int gather(struct leaving *leaving)
{
	const struct timespec moment = { .tv_nsec = 1000000 };
	const uint64_t until = state_now_us() + CHUNKS_MS * 1000;
	int error;

	/* A free that is under way ends. */
	while ((error = region_pick_all(leaving->device, &leaving->picks, &leaving->count)) == EBUSY &&
	       state_now_us() < until)
		nanosleep(&moment, NULL);
	if (error)
		return error;
	leaving->parked = calloc(leaving->count ? leaving->count : 1, sizeof(*leaving->parked));
	if (!leaving->parked) {
		region_put(leaving->picks, leaving->count);
		leaving->count = 0;
		return ENOMEM;
	}
	for (size_t i = 0; i < leaving->count; i++)
		leaving->parked[i].fd = -1;
	return 0;
}

/* Has one chunk held by a descriptor. */
static int park(struct leaving *leaving, size_t i)
{
	const struct chunk *chunk = chunk_of(leaving, i);
	struct parked *parked = &leaving->parked[i];
	CUresult result;
	int fd = -1;

	errno = 0;
	CALL_REAL(result, cuMemExportToShareableHandle,
		  (&fd, chunk->memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	if (result != CUDA_SUCCESS || fd < 0)
		return errno == EMFILE ? EMFILE : EIO;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	CALL_REAL(result, cuMemUnmap, (address_of(leaving, i), bytes_of(leaving, i)));
	if (result != CUDA_SUCCESS) {
		close(fd);
		return EIO;
	}
	parked->fd = fd;
	parked->unmapped = true;
	if (chunk->place == CHUNK_HOST) {
		CALL_REAL(result, cuMemUnmap, (chunk->window, bytes_of(leaving, i)));
		parked->shut = parked->barred = result == CUDA_SUCCESS;
	}
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuMemRelease, (chunk->memory));
	parked->released = result == CUDA_SUCCESS;
	return parked->released ? 0 : EIO;
}

static int park_all(bool near)
{
	int error = 0;

	for (size_t d = 0; d < departure.devices; d++)
		for (size_t i = 0; i < departure.leaving[d].count && !error; i++)
			if (near || chunk_of(&departure.leaving[d], i)->place == CHUNK_HOST)
				error = park(&departure.leaving[d], i);
	return error;
}

static int come_to_a_rest(void)
{
	int error = 0;

	departure.kept = state_keep_devices();
	if (!departure.kept)
		return EBUSY;
	state_devices(join, NULL);
	for (size_t d = 0; d < departure.devices; d++)
		pthread_mutex_lock(&departure.leaving[d].device->mover->lock);	/* nobody else takes two */
	for (size_t d = 0; d < departure.devices && !error; d++)
		if (!batch_reap(departure.leaving[d].device) || region_is_abroad(departure.leaving[d].device))
			error = EBUSY;
	departure.closed = !error && gate_close(GATE_MS);
	if (!departure.closed)
		return EBUSY;
	for (size_t d = 0; d < departure.devices; d++)
		if (!batch_quiet(departure.leaving[d].device) || !state_borrow(departure.leaving[d].device))
			return EBUSY;
		else
			departure.borrowed++;
	for (size_t d = 0; d < departure.devices && !error; d++) {
		pool_trim(departure.leaving[d].device, 0);
		pool_halt(departure.leaving[d].device);
		error = gather(&departure.leaving[d]);
	}
	return error;
}

int departure_begin(bool near)
{
	const uint64_t start = state_now_us();
	int error;

	if (ipc_imported() || foreign_is_in_host())
		return EOPNOTSUPP;
	error = come_to_a_rest();
	if (!error) {
		allow_files();
		error = park_all(near);
	}
	departure.begun = true;
	/* From here on somebody may checkpoint us. */
	if (!error && !counters_stand(true))
		error = EOPNOTSUPP;
	state_log("departure: error %d, %llu us", error, (unsigned long long)(state_now_us() - start));
	if (error)
		departure_end();
	return error;
}

bool departure_begun(void)
{
	return departure.begun;
}

/* Coming back */

static CUresult take(struct leaving *leaving, size_t i)
{
	const struct chunk *chunk = chunk_of(leaving, i);
	struct parked *parked = &leaving->parked[i];
	const CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = leaving->device->ordinal },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	CUmemGenericAllocationHandle memory = chunk->memory;
	CUresult result = CUDA_SUCCESS;

	if (parked->released) {
		CALL_REAL(result, cuMemImportFromShareableHandle,
			  (&memory, (void *)(uintptr_t)parked->fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
		if (result != CUDA_SUCCESS)
			return result;
		region_moved(&leaving->picks[i], chunk->place, memory, chunk->window);
		parked->released = false;
	}
	if (parked->shut) {
		CALL_REAL(result, cuMemMap, (chunk->window, bytes_of(leaving, i), 0, memory, 0));
		if (result != CUDA_SUCCESS)
			return result;
		parked->shut = false;
	}
	if (parked->barred) {
		CALL_REAL(result, cuMemSetAccess, (chunk->window, bytes_of(leaving, i), &access, 1));
		if (result != CUDA_SUCCESS)
			return result;
		parked->barred = false;
	}
	if (parked->unmapped)
		CALL_REAL(result, cuMemMap, (address_of(leaving, i), bytes_of(leaving, i), 0, memory, 0));
	parked->unmapped = result != CUDA_SUCCESS;
	parked->back = !parked->unmapped;
	return result;
}

/* One call for neighbours that were mapped again: the number of them from `i` on, at least 1. */
static size_t allow(struct leaving *leaving, size_t i)
{
	const struct region *region = leaving->picks[i].region;
	CUresult result = CUDA_ERROR_UNKNOWN;
	CUmemAccessDesc access[GG_DEVICES];
	size_t bytes = 0, count, next = i;

	while (next < leaving->count && leaving->picks[next].region == region && leaving->parked[next].back &&
	       leaving->picks[next].index == leaving->picks[i].index + (next - i))
		bytes += bytes_of(leaving, next++);
	if (next == i)
		return 1;
	pthread_mutex_lock(&region_lock);
	count = region_access(region, access);
	pthread_mutex_unlock(&region_lock);
	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		CALL_REAL(result, cuMemSetAccess, (address_of(leaving, i), bytes, access, count));
	if (result != CUDA_SUCCESS)
		state_log("%zu bytes at %llx cannot be used: error %d", bytes, address_of(leaving, i), (int)result);
	return next - i;
}

static void take_all(struct leaving *leaving)
{
	for (size_t i = 0; i < leaving->count; i++) {
		CUresult result = CUDA_ERROR_UNKNOWN;

		if (leaving->parked[i].fd < 0)
			continue;
		for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
			result = take(leaving, i);
		if (result != CUDA_SUCCESS)
			state_log("%zu bytes at %llx are lost: error %d", bytes_of(leaving, i),
				  address_of(leaving, i), (int)result);
		close(leaving->parked[i].fd);
	}
	for (size_t i = 0; i < leaving->count;)
		i += allow(leaving, i);
}

static void let_go(struct leaving *leaving, bool elsewhere)
{
	for (size_t i = 0; elsewhere && i < leaving->count; i++)
		if (leaving->parked[i].back && chunk_of(leaving, i)->place == CHUNK_DEVICE)
			region_abroad(&leaving->picks[i]);
	region_put(leaving->picks, leaving->count);
	free(leaving->picks);
	free(leaving->parked);
}

void departure_end(void)
{
	const uint64_t start = state_now_us();
	bool elsewhere[GG_ORDINALS] = { false };

	/* Before any call of the driver: who has locked us by then sees it, and does not go on; or those calls wait. */
	counters_stand(false);
	if (departure.borrowed)
		real.cuCtxSynchronize();	/* while we are locked, none of them returns */
	for (size_t d = 0; d < departure.devices; d++) {
		take_all(&departure.leaving[d]);
		elsewhere[d] = departure.borrowed && state_identify(departure.leaving[d].device);
	}
	for (size_t d = departure.borrowed; d--;)
		state_return(departure.leaving[d].device);
	/* The places are right before anybody goes on. */
	for (size_t d = 0; d < departure.devices; d++)
		let_go(&departure.leaving[d], elsewhere[d]);
	if (departure.closed)
		gate_open();
	for (size_t d = 0; d < departure.devices; d++) {
		pool_resume(departure.leaving[d].device);
		pthread_mutex_unlock(&departure.leaving[d].device->mover->lock);
	}
	if (departure.kept)
		state_let_devices();
	if (departure.more_files)
		setrlimit(RLIMIT_NOFILE, &departure.files);
	memset(&departure, 0, sizeof(departure));
	state_log("back after a departure: %llu us", (unsigned long long)(state_now_us() - start));
}

/* Home */

bool departure_home(struct device *device)
{
	struct pick picks[BATCH_MOST_CHUNKS];
	struct mover *mover = device->mover;
	struct batch *batch = NULL;
	uint64_t moved = 0;
	size_t count;

	if (!mover || !region_is_abroad(device))
		return false;
	pthread_mutex_lock(&mover->lock);
	state_enter();
	count = batch_reap(device) ? region_pick_abroad(device, mover->batch_bytes, picks, BATCH_MOST_CHUNKS) : 0;
	if (count)
		batch = batch_new(true, picks, count);
	if (batch) {
		batch->within = batch->home = true;
		moved = batch_move(device, batch);
	} else {
		region_put(picks, count);
	}
	state_leave();
	pthread_mutex_unlock(&mover->lock);
	return moved && region_is_abroad(device);
}

void departure_forget(void)
{
	for (size_t d = 0; d < departure.devices; d++)
		for (size_t i = 0; departure.leaving[d].parked && i < departure.leaving[d].count; i++)
			if (departure.leaving[d].parked[i].fd >= 0)
				close(departure.leaving[d].parked[i].fd);
	memset(&departure, 0, sizeof(departure));
}
