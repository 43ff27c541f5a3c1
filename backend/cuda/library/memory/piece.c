// SPDX-License-Identifier: Apache-2.0
#include "piece.h"

#include <string.h>
#include <time.h>

#include "daemon.h"
#include "driver.h"
#include "hint.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "pool.h"

/* Nanoseconds between two looks whether it is over. */
#define LOOK_NS 200000
/* Microseconds that one call may take (mover.h). What is not there by then is on its way, and does not come back. */
#define OUT_US 2000000

/* The stream and the event of the library on each device, by ordinal; for the listening thread. */
static struct {
	CUstream stream;
	CUevent event;
	uint64_t contexts;	/* as of the device when they were made */
} ways[GG_ORDINALS];

/* A call that takes pieces out or in. */
struct trip {
	uint64_t bytes, until;	/* the bytes to move, and the moment until which it may, us */
	uint64_t moved;
	bool refused;		/* the daemon has no more room */
};

/* Have a stream and an event on a device that is borrowed. */
static bool have_way(struct device *device)
{
	__typeof__(&ways[0]) way = &ways[device->ordinal];

	if (way->stream && way->contexts == device->contexts)
		return true;
	way->stream = NULL;	/* it went with its context */
	if (real.cuStreamCreate(&way->stream, CU_STREAM_NON_BLOCKING))
		return false;
	if (real.cuEventCreate(&way->event, CU_EVENT_DISABLE_TIMING)) {
		real.cuStreamDestroy_v2(way->stream);
		way->stream = NULL;
		return false;
	}
	way->contexts = device->contexts;
	return true;
}

/* Wait until what was prefetched is there, or on its way at `until`; false: the driver says that it is not. */
static bool arrives(struct device *device, uint64_t until)
{
	const struct timespec moment = { .tv_nsec = LOOK_NS };
	CUresult result = real.cuEventRecord(ways[device->ordinal].event, ways[device->ordinal].stream);

	while (!result && (result = real.cuEventQuery(ways[device->ordinal].event)) == CUDA_ERROR_NOT_READY) {
		if (moment_us() >= until) {
			log_line("device %d: managed memory is still on its way", device->ordinal);
			return true;
		}
		result = CUDA_SUCCESS;
		nanosleep(&moment, NULL);
	}
	if (result)
		log_line("device %d: managed memory does not move, error %d", device->ordinal, (int)result);
	return !result;
}

static CUresult send(const struct unified *unified, size_t piece, CUmemLocation location)
{
	return hint_prefetch(unified_piece(unified, piece), unified_piece_bytes(unified, piece), location,
			     ways[unified->device->ordinal].stream, false);
}

static CUresult keep(const struct unified *unified, size_t piece)
{
	return hint_keep(&unified->shadow, unified_piece(unified, piece), unified_piece_bytes(unified, piece),
			 unified->device);
}

static void restore(const struct unified *unified, size_t piece)
{
	hint_restore(&unified->shadow, unified_piece(unified, piece), unified_piece_bytes(unified, piece),
		     unified->device);
}

bool piece_come(struct unified *unified, size_t piece)
{
	struct device *device = unified->device;
	const uint64_t bytes = unified_piece_charge(unified, piece);
	uint64_t credit, need;

	if (unified->place[piece] == UNIFIED_REFUSED) {
		if (!unified_charge(device, bytes))
			return false;
	} else {
		credit = pool_spend(device, bytes);
		need = bytes - credit;
		if (need && daemon_move_in(device, need)) {
			pool_credit(device, credit);
			return false;
		}
		__atomic_add_fetch(&device->resident, need, __ATOMIC_RELAXED);
		__atomic_sub_fetch(&device->swapped, need, __ATOMIC_RELAXED);
		__atomic_add_fetch(&device->managed, bytes, __ATOMIC_RELAXED);
	}
	restore(unified, piece);
	unified->place[piece] = UNIFIED_ON_GPU;
	return true;
}

/* Take pieces of an allocation out, those at its end first: programs begin at the beginning. */
static void take_out(struct unified *unified, struct trip *trip)
{
	struct device *device = unified->device;
	uint64_t moved = 0;

	for (size_t i = unified->count; i-- > 0 && trip->moved + moved < trip->bytes && moment_us() < trip->until;) {
		if (unified->place[i] != UNIFIED_ON_GPU)
			continue;
		if (keep(unified, i) || send(unified, i, HINT_HOST)) {
			restore(unified, i);	/* as far as it went */
			break;
		}
		unified->place[i] = UNIFIED_LEAVING;
		moved += unified_piece_charge(unified, i);
	}
	if (!moved)
		return;
	if (!arrives(device, trip->until))
		moved = 0;
	for (size_t i = 0; i < unified->count; i++) {
		if (unified->place[i] != UNIFIED_LEAVING)
			continue;
		unified->place[i] = moved ? UNIFIED_IN_HOST : UNIFIED_ON_GPU;
		if (!moved)
			restore(unified, i);
	}
	if (moved) {
		__atomic_sub_fetch(&device->managed, moved, __ATOMIC_RELAXED);
		pool_credit(device, moved);
		unified_touch(unified);
	}
	trip->moved += moved;
}

static void take_in(struct unified *unified, struct trip *trip)
{
	for (size_t i = 0; i < unified->count && trip->moved < trip->bytes; i++) {
		if (unified->place[i] != UNIFIED_IN_HOST)
			continue;
		trip->refused = !piece_come(unified, i);
		if (trip->refused)
			return;
		trip->moved += unified_piece_charge(unified, i);
		send(unified, i, hint_gpu(unified->device));
	}
}

/* Call `take` for the allocations of a device with pieces in a place, by address; returns the bytes moved. */
static uint64_t each(struct device *device, enum unified_place place, struct trip trip,
		     void (*take)(struct unified *, struct trip *))
{
	CUdeviceptr behind = 0;
	struct unified *unified;
	CUstreamCaptureMode mode;

	if (!device->pool || !unified_any())
		return 0;
	mode = driver_enter();
	if (device_borrow(device)) {
		while (!trip.refused && have_way(device) && trip.moved < trip.bytes && moment_us() < trip.until &&
		       (unified = unified_own_next(device, behind, place))) {
			behind = unified->start;
			take(unified, &trip);
			unified_disown(unified);
		}
		device_return(device);
	}
	driver_leave(mode);
	if (trip.moved)
		daemon_report(device);
	return trip.moved;
}

uint64_t piece_out(struct device *device, uint64_t bytes, uint64_t *usec)
{
	const uint64_t begun = moment_us();
	const struct trip trip = { .bytes = bytes, .until = begun + OUT_US };
	const uint64_t moved = each(device, UNIFIED_ON_GPU, trip, take_out);

	*usec += moment_us() - begun;
	return moved;
}

uint64_t piece_in(struct device *device, uint64_t bytes, uint64_t *usec)
{
	const uint64_t begun = moment_us();
	const struct trip trip = { .bytes = bytes, .until = UINT64_MAX };
	const uint64_t moved = each(device, UNIFIED_IN_HOST, trip, take_in);

	*usec += moment_us() - begun;
	return moved;
}

static void forget(void)
{
	memset(ways, 0, sizeof(ways));
}

LIFE(.stage = LIFE_FOREIGN, .forget = forget);
