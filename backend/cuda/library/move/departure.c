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
#include "calm.h"
#include "clean.h"
#include "chunk.h"
#include "driver.h"
#include "foreign.h"
#include "gate.h"
#include "home.h"
#include "host.h"
#include "importer.h"
#include "kept.h"
#include "lent.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "object.h"
#include "pick.h"
#include "place.h"
#include "pool.h"
#include "totals.h"
#include "tree.h"

/* Longest time for which the gate may be closed until no thread is inside, and until no thread has a chunk, in ms. */
#define GATE_MS 500
#define CHUNKS_MS 500
/* Attempts to undo something. */
#define TRIES 3

/* A chunk, and how far it has got. */
struct parked {
	int fd;			/* -1: none yet, or left to the driver */
	bool unmapped;		/* from its region */
	bool shut;		/* from its window */
	bool barred;		/* no GPU may access it at its window */
	bool released;
	bool imported;		/* imported again */
	bool back;		/* it can be mapped again */
};

struct leaving {
	struct device *device;
	struct pick *picks;
	struct parked *parked;
	size_t count;
};

/* State of the listening thread; all zero except while the program stands by. */
static struct {
	struct leaving leaving[GG_ORDINALS];
	size_t devices;		/* number in `leaving`; all of them are locked */
	size_t borrowed;	/* the first of these have a borrowed context */
	bool kept;		/* no further device is set up */
	bool closed;		/* the gate is closed */
	bool stands;		/* it is closed also to threads that wait for work */
	bool more_files;	/* the limit of open files is raised */
	struct rlimit files;
	bool begun;
} departure;

static struct chunk *chunk_of(const struct leaving *leaving, size_t i)
{
	return &leaving->picks[i].region->chunk[leaving->picks[i].index];
}

/* The address of a chunk, for log lines. */
static CUdeviceptr address_of(const struct leaving *leaving, size_t i)
{
	const struct region *region = leaving->picks[i].region;

	return (region->object ? region->object->name : region->address) +
	       chunk_offset(region, leaving->picks[i].index);
}

static size_t bytes_of(const struct leaving *leaving, size_t i)
{
	return chunk_bytes(leaving->picks[i].region, leaving->picks[i].index);
}

/* Consecutive chunks. */
struct run {
	size_t count, bytes;
};

/* The run of chunks from `i` on for which `is` holds. */
static struct run run_from(const struct leaving *leaving, size_t i, bool (*is)(const struct parked *parked))
{
	struct run run = { 0 };

	while (i + run.count < leaving->count && is(&leaving->parked[i + run.count]) &&
	       leaving->picks[i + run.count].region == leaving->picks[i].region &&
	       leaving->picks[i + run.count].index == leaving->picks[i].index + run.count)
		run.bytes += bytes_of(leaving, i + run.count++);
	return run;
}

/* Going away */

static void join(struct device *device, void *unused)
{
	(void)unused;
	if (device->mover && device->pool && device->regions)
		departure.leaving[departure.devices++].device = device;
}

/* Raises the limit of open files: each chunk takes a descriptor. */
static void allow_files(void)
{
	struct rlimit most;

	if (getrlimit(RLIMIT_NOFILE, &departure.files) || departure.files.rlim_cur == departure.files.rlim_max)
		return;
	most = (struct rlimit){ departure.files.rlim_max, departure.files.rlim_max };
	departure.more_files = !setrlimit(RLIMIT_NOFILE, &most);
}

/* Takes all chunks of a device for this thread alone. */
static int gather(struct leaving *leaving)
{
	const struct timespec moment = { .tv_nsec = 1000000 };
	const uint64_t until = moment_us() + CHUNKS_MS * 1000;
	int error;

	/* Wait for a free in progress to end. */
	while ((error = pick_all(leaving->device, &leaving->picks, &leaving->count)) == EBUSY &&
	       moment_us() < until)
		nanosleep(&moment, NULL);
	if (error)
		return error;
	leaving->parked = calloc(leaving->count ? leaving->count : 1, sizeof(*leaving->parked));
	if (!leaving->parked) {
		pick_put(leaving->picks, leaving->count);
		leaving->count = 0;
		return ENOMEM;
	}
	for (size_t i = 0; i < leaving->count; i++)
		leaving->parked[i].fd = -1;
	return 0;
}

/* Exports one chunk, so that a descriptor holds it. */
static int hold(struct leaving *leaving, size_t i)
{
	struct parked *parked = &leaving->parked[i];
	CUresult result;
	int fd = -1;

	errno = 0;
	CALL_REAL(result, cuMemExportToShareableHandle,
		  (&fd, chunk_of(leaving, i)->memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	if (result != CUDA_SUCCESS || fd < 0)
		return errno == EMFILE ? EMFILE : EIO;
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	parked->fd = fd;
	return 0;
}

static bool is_held(const struct parked *parked)
{
	return parked->fd >= 0;
}

/* Unmaps as many chunks as one call can, since each call costs the same (1 ms on an H200). Moves `i` on behind them. */
static int unmap(struct leaving *leaving, size_t *i)
{
	const struct run run = run_from(leaving, *i, is_held);
	const struct place_run place = { leaving->picks[*i].region, leaving->picks[*i].index, run.count };
	bool left = true;

	if (run.count)
		left = place_leave(&place);
	for (size_t k = 0; k < run.count && left; k++)
		leaving->parked[*i + k].unmapped = true;
	*i += run.count ? run.count : 1;
	return left ? 0 : EIO;
}

/* Releases an unmapped chunk; only its descriptor keeps it. */
static int let_go_of(struct leaving *leaving, size_t i)
{
	const struct chunk *chunk = chunk_of(leaving, i);
	struct parked *parked = &leaving->parked[i];
	CUresult result = CUDA_SUCCESS;

	if (chunk->place == CHUNK_HOST) {
		CALL_REAL(result, cuMemUnmap, (chunk->window, bytes_of(leaving, i)));
		parked->shut = parked->barred = result == CUDA_SUCCESS;
	}
	if (result == CUDA_SUCCESS)
		CALL_REAL(result, cuMemRelease, (chunk->memory));
	parked->released = result == CUDA_SUCCESS;
	return parked->released ? 0 : EIO;
}

static int park_all(struct leaving *leaving, bool near)
{
	int error = 0;

	for (size_t i = 0; i < leaving->count && !error; i++)
		if (near || chunk_of(leaving, i)->place == CHUNK_HOST)
			error = hold(leaving, i);
	for (size_t i = 0; i < leaving->count && !error;)
		error = unmap(leaving, &i);
	for (size_t i = 0; i < leaving->count && !error; i++)
		if (is_held(&leaving->parked[i]))
			error = let_go_of(leaving, i);
	return error;
}

/* False: something keeps running, or the gate is open. */
static bool close_calmly(void)
{
	struct device *first = departure.devices ? departure.leaving[0].device : NULL;
	bool calm;

	if (!first)
		return departure.closed = gate_close(GATE_MS);
	departure.closed = calm = calm_close(first, GATE_MS);
	for (size_t d = 0; d < departure.devices && calm; d++) {
		calm = calm_quiet(first, departure.leaving[d].device) && device_borrow(departure.leaving[d].device);
		departure.borrowed += calm;
	}
	calm_over(first, calm);
	return calm;
}

static int come_to_a_rest(void)
{
	int error = 0;

	departure.kept = device_keep_all();
	if (!departure.kept)
		return EBUSY;
	device_each(join, NULL);
	for (size_t d = 0; d < departure.devices; d++)
		home_all(departure.leaving[d].device);	/* imported memory cannot be exported */
	for (size_t d = 0; d < departure.devices; d++)
		pthread_mutex_lock(&departure.leaving[d].device->mover->lock);	/* no other thread takes two of these */
	for (size_t d = 0; d < departure.devices && !error; d++)
		if (!batch_reap(departure.leaving[d].device) || tree_has_imported(departure.leaving[d].device))
			error = EBUSY;
	if (error)
		return error;
	if (!close_calmly())
		return EBUSY;
	departure.stands = gate_stand(GATE_MS);
	if (!departure.stands)
		return EBUSY;
	for (size_t d = 0; d < departure.devices && !error; d++) {
		pool_trim(departure.leaving[d].device, 0);
		clean_drop_all(departure.leaving[d].device);
		host_halt(departure.leaving[d].device);
		error = gather(&departure.leaving[d]);
	}
	return error;
}

int departure_begin(bool near)
{
	const uint64_t start = moment_us();
	int error;

	/* Memory that other processes have cannot be moved along. */
	if (importer_any() || foreign_is_in_host() || lent_any())
		return EOPNOTSUPP;
	error = come_to_a_rest();
	if (!error) {
		allow_files();
		for (size_t d = 0; d < departure.devices && !error; d++)
			error = park_all(&departure.leaving[d], near);
	}
	departure.begun = true;
	/* The process may be checkpointed from here on. */
	if (!error && !totals_stand(true))
		error = EOPNOTSUPP;
	log_line("departure: error %d, %llu us", error, (unsigned long long)(moment_us() - start));
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
		tree_moved(&leaving->picks[i], chunk->place, memory, chunk->window);
		parked->released = false;
		parked->imported = true;
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
	parked->back = parked->unmapped;
	return CUDA_SUCCESS;
}

static bool is_back(const struct parked *parked)
{
	return parked->back;
}

/* Maps consecutive chunks again; returns how many from `i` on, at least 1. */
static size_t enter(struct leaving *leaving, size_t i)
{
	const struct run run = run_from(leaving, i, is_back);
	const struct place_run place = { leaving->picks[i].region, leaving->picks[i].index, run.count };
	CUresult result = CUDA_ERROR_UNKNOWN;

	if (!run.count)
		return 1;
	for (int try = 0; try < TRIES && result != CUDA_SUCCESS; try++)
		result = place_enter(&place, NULL);
	if (result != CUDA_SUCCESS)
		log_line("%zu bytes at %llx are lost: error %d", run.bytes, address_of(leaving, i), (int)result);
	return run.count;
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
			log_line("%zu bytes at %llx are lost: error %d", bytes_of(leaving, i),
				  address_of(leaving, i), (int)result);
		close(leaving->parked[i].fd);
	}
	for (size_t i = 0; i < leaving->count;)
		i += enter(leaving, i);
}

static void let_go(struct leaving *leaving)
{
	for (size_t i = 0; i < leaving->count; i++)
		if (leaving->parked[i].imported)
			tree_imported(&leaving->picks[i]);
	pick_put(leaving->picks, leaving->count);
	free(leaving->picks);
	free(leaving->parked);
}

/* Allocates and frees some memory. In a locked or checkpointed process this returns only after the unlock. The calls
 * needed later would not wait but fail, and after that other calls would end the process (measured: docs/nvidia.md). */
static void await_unlock(struct device *device)
{
	CUmemGenericAllocationHandle memory;

	if (pool_create(device, CLASS_SMALL, &memory) == CUDA_SUCCESS)
		kept_release(device, memory);
}

void departure_end(void)
{
	const uint64_t start = moment_us();

	/* Before any call of the driver: an agent that has locked the process by now sees this and stops, or the calls
	 * below wait. */
	totals_stand(false);
	if (departure.borrowed)
		await_unlock(departure.leaving[0].device);
	for (size_t d = 0; d < departure.devices; d++) {
		struct leaving *leaving = &departure.leaving[d];
		bool elsewhere;

		take_all(leaving);
		elsewhere = departure.borrowed && device_identify(leaving->device);
		if (leaving->parked)
			home_awaits(leaving->device, elsewhere);
	}
	for (size_t d = departure.borrowed; d--;)
		device_return(departure.leaving[d].device);
	/* All memory must be in place before any thread goes on. */
	for (size_t d = 0; d < departure.devices; d++)
		let_go(&departure.leaving[d]);
	if (departure.stands)
		gate_go_on();
	if (departure.closed)
		gate_open();
	for (size_t d = 0; d < departure.devices; d++) {
		host_resume(departure.leaving[d].device);
		pthread_mutex_unlock(&departure.leaving[d].device->mover->lock);
	}
	if (departure.kept)
		device_let_all();
	if (departure.more_files)
		setrlimit(RLIMIT_NOFILE, &departure.files);
	memset(&departure, 0, sizeof(departure));
	log_line("back after a departure: %llu us", (unsigned long long)(moment_us() - start));
}

static void forget(void)
{
	for (size_t d = 0; d < departure.devices; d++)
		for (size_t i = 0; departure.leaving[d].parked && i < departure.leaving[d].count; i++)
			if (departure.leaving[d].parked[i].fd >= 0)
				close(departure.leaving[d].parked[i].fd);
	memset(&departure, 0, sizeof(departure));
}

LIFE(.stage = LIFE_MOVES, .forget = forget);
