// SPDX-License-Identifier: Apache-2.0
#include "unified.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon.h"
#include "driver.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "pool.h"

/* What goes and comes together. The driver moves 2 MiB at a time. */
#define PIECE (16 * GG_MIB)
/* What advice is about: the pages of the host. */
#define PAGE UINT64_C(4096)
/* For how long a prefetch is waited for, us; what is not there by then is on its way, and does not come back. */
#define PREFETCH_US 1000000
#define LOOK_NS 200000
/* The time of one call, us (mover.h). */
#define OUT_US 2000000

enum place {
	ON_GPU,		/* it may be: charged */
	IN_HOST,	/* by our advice: in the books as swapped */
	REFUSED,	/* the same, from the beginning, and in no books: a limit left no room for it */
};

/* What the program has asked for. */
struct advice {
	bool mostly_read, prefers, by_host, fetched;
	CUmemLocation preferred, last;
	uint64_t by;		/* GPUs, a bit an ordinal */
};

/* ... from here to the next. */
struct span {
	CUdeviceptr start;
	struct advice advice;
};

struct unified {
	struct device *device;
	CUcontext context;
	CUdeviceptr start;
	uint64_t bytes;
	bool touched;		/* some was in the host */
	bool busy;		/* a thread is at it, without the lock */
	struct span *spans;	/* by address; the first is the beginning */
	size_t span_count, span_room;
	size_t count;		/* of pieces */
	unsigned char place[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t rested = PTHREAD_COND_INITIALIZER;
static struct unified **all;	/* by address */
static size_t all_count, all_room;
static unsigned int known;	/* atomically: how many there are */
static struct { CUstream stream; CUevent event; uint64_t contexts; } ways[GG_ORDINALS];

static const CUmemLocation host = { .type = CU_MEM_LOCATION_TYPE_HOST };

static uint64_t least(uint64_t one, uint64_t other)
{
	return one < other ? one : other;
}

static uint64_t round_up(uint64_t bytes, uint64_t to)
{
	return (bytes + to - 1) / to * to;
}

static CUdeviceptr piece_start(const struct unified *unified, size_t piece)
{
	return unified->start + piece * PIECE;
}

static uint64_t piece_bytes(const struct unified *unified, size_t piece)
{
	return least(PIECE, unified->bytes - piece * PIECE);
}

/* What a piece counts in the books. */
static uint64_t piece_charge(const struct unified *unified, size_t piece)
{
	return round_up(piece_bytes(unified, piece), GG_CHUNK);
}

/* The first allocation that begins behind an address. With the lock. */
static size_t behind(CUdeviceptr address)
{
	size_t low = 0, high = all_count;

	while (low < high) {
		const size_t middle = (low + high) / 2;

		if (all[middle]->start <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* The one that has an address; NULL: none. With the lock. */
static struct unified *at(CUdeviceptr address)
{
	const size_t next = behind(address);
	struct unified *unified = next ? all[next - 1] : NULL;

	return unified && address - unified->start < round_up(unified->bytes, PAGE) ? unified : NULL;
}

/* Waits until no thread is at it. With the lock; it may have gone meanwhile. */
static struct unified *resting(CUdeviceptr address)
{
	struct unified *unified;

	while ((unified = at(address)) && unified->busy)
		pthread_cond_wait(&rested, &lock);
	return unified;
}

static void rest(struct unified *unified)
{
	unified->busy = false;
	pthread_cond_broadcast(&rested);
}

/* Spans */

/* The span that has an address. */
static size_t span_at(const struct unified *unified, CUdeviceptr address)
{
	size_t i = unified->span_count - 1;

	while (i && unified->spans[i].start > address)
		i--;
	return i;
}

static CUdeviceptr span_end(const struct unified *unified, size_t i)
{
	return i + 1 < unified->span_count ? unified->spans[i + 1].start :
					     unified->start + round_up(unified->bytes, PAGE);
}

/* Has one begin there; false without memory. */
static bool split(struct unified *unified, CUdeviceptr address)
{
	const size_t i = span_at(unified, address);
	struct span *more;

	if (unified->spans[i].start == address || address >= span_end(unified, unified->span_count - 1))
		return true;
	if (unified->span_count == unified->span_room) {
		more = realloc(unified->spans, 2 * unified->span_room * sizeof(*more));
		if (!more)
			return false;
		unified->spans = more;
		unified->span_room *= 2;
	}
	memmove(&unified->spans[i + 2], &unified->spans[i + 1], (unified->span_count - i - 1) * sizeof(*unified->spans));
	unified->spans[i + 1] = (struct span){ address, unified->spans[i].advice };
	unified->span_count++;
	return true;
}

static bool same_place(const CUmemLocation *one, const CUmemLocation *other)
{
	return one->type == other->type && (one->type == CU_MEM_LOCATION_TYPE_HOST || one->id == other->id);
}

static void note(struct advice *advice, CUmem_advise what, const CUmemLocation *location)
{
	const bool is_gpu = location->type == CU_MEM_LOCATION_TYPE_DEVICE;
	const uint64_t bit = is_gpu && location->id >= 0 && location->id < GG_ORDINALS ? UINT64_C(1) << location->id : 0;

	switch (what) {
	case CU_MEM_ADVISE_SET_READ_MOSTLY: advice->mostly_read = true; break;
	case CU_MEM_ADVISE_UNSET_READ_MOSTLY: advice->mostly_read = false; break;
	case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
		advice->prefers = true;
		advice->preferred = *location;
		break;
	case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION: advice->prefers = false; break;
	case CU_MEM_ADVISE_SET_ACCESSED_BY:
		advice->by |= bit;
		advice->by_host |= !is_gpu;
		break;
	case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
		advice->by &= ~bit;
		advice->by_host &= is_gpu;
		break;
	}
}

/* The part of a range that is in an allocation, in whole pages; false: none is. */
static bool within(const struct unified *unified, CUdeviceptr *start, CUdeviceptr *end)
{
	const CUdeviceptr last = unified->start + round_up(unified->bytes, PAGE);

	*start &= ~(PAGE - 1);
	*end = round_up(*end, PAGE);
	if (*start < unified->start)
		*start = unified->start;
	if (*end > last)
		*end = last;
	return *start < *end;
}

/* Calls `visit` for the spans of a range, split at its ends. With the lock. */
static void each_span(struct unified *unified, CUdeviceptr start, CUdeviceptr end,
		      void (*visit)(struct advice *, void *), void *argument)
{
	if (!within(unified, &start, &end) || !split(unified, start) || !split(unified, end))
		return;
	for (size_t i = span_at(unified, start); i < unified->span_count && unified->spans[i].start < end; i++)
		visit(&unified->spans[i].advice, argument);
}

struct noted {
	CUmem_advise what;
	CUmemLocation location;
};

static void note_one(struct advice *advice, void *argument)
{
	const struct noted *noted = argument;

	note(advice, noted->what, &noted->location);
}

static void note_fetch(struct advice *advice, void *argument)
{
	advice->fetched = true;
	advice->last = *(const CUmemLocation *)argument;
}

/* The driver. Within driver_enter. */

static CUresult advise(CUdeviceptr start, uint64_t bytes, CUmem_advise what, CUmemLocation location)
{
	if (real.cuMemAdvise_v2)
		return real.cuMemAdvise_v2(start, bytes, what, location);
	if (!real.cuMemAdvise || location.type > CU_MEM_LOCATION_TYPE_HOST)
		return CUDA_ERROR_NOT_SUPPORTED;
	return real.cuMemAdvise(start, bytes, what,
				location.type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : location.id);
}

static CUresult prefetch(CUdeviceptr start, uint64_t bytes, CUmemLocation location, CUstream stream, bool per_thread)
{
	const CUdevice ordinal = location.type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : location.id;

	if (per_thread && real.cuMemPrefetchAsync_v2_ptsz)
		return real.cuMemPrefetchAsync_v2_ptsz(start, bytes, location, 0, stream);
	if (!per_thread && real.cuMemPrefetchAsync_v2)
		return real.cuMemPrefetchAsync_v2(start, bytes, location, 0, stream);
	if (location.type > CU_MEM_LOCATION_TYPE_HOST)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (per_thread && real.cuMemPrefetchAsync_ptsz)
		return real.cuMemPrefetchAsync_ptsz(start, bytes, ordinal, stream);
	return real.cuMemPrefetchAsync ? real.cuMemPrefetchAsync(start, bytes, ordinal, stream) : CUDA_ERROR_NOT_SUPPORTED;
}

static CUmemLocation gpu_of(const struct device *device)
{
	return (CUmemLocation){ .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal };
}

/* A stream and an event of ours on a device that is borrowed; by the listening thread. */
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

static void wait_for(struct device *device)
{
	const struct timespec moment = { .tv_nsec = LOOK_NS };
	const uint64_t until = moment_us() + PREFETCH_US;

	if (real.cuEventRecord(ways[device->ordinal].event, ways[device->ordinal].stream))
		return;
	while (real.cuEventQuery(ways[device->ordinal].event) == CUDA_ERROR_NOT_READY && moment_us() < until)
		nanosleep(&moment, NULL);
}

/* Calls for each span of a piece, as they are: the caller has the allocation to itself, and no other changes them. */
static CUresult each_of(const struct unified *unified, size_t piece,
			CUresult (*call)(CUdeviceptr, uint64_t, const struct advice *, const struct unified *))
{
	CUdeviceptr start = piece_start(unified, piece);
	const CUdeviceptr end = start + piece_bytes(unified, piece);
	CUresult result = CUDA_SUCCESS;

	for (size_t i = span_at(unified, start); !result && start < end; i++) {
		const CUdeviceptr stop = least(end, span_end(unified, i));

		result = call(start, stop - start, &unified->spans[i].advice, unified);
		start = stop;
	}
	return result;
}

static CUresult keep_there(CUdeviceptr start, uint64_t bytes, const struct advice *advice, const struct unified *unified)
{
	CUresult result = CUDA_SUCCESS;

	if (advice->mostly_read)	/* each that reads would have a copy */
		result = advise(start, bytes, CU_MEM_ADVISE_UNSET_READ_MOSTLY, host);
	if (!result)
		result = advise(start, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, host);
	return result ? result : advise(start, bytes, CU_MEM_ADVISE_SET_ACCESSED_BY, gpu_of(unified->device));
}

static CUresult as_asked(CUdeviceptr start, uint64_t bytes, const struct advice *advice, const struct unified *unified)
{
	const bool by = advice->by >> unified->device->ordinal & 1;
	CUresult result = advice->prefers ?
		advise(start, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, advice->preferred) :
		advise(start, bytes, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, host);

	if (!result && !by)
		result = advise(start, bytes, CU_MEM_ADVISE_UNSET_ACCESSED_BY, gpu_of(unified->device));
	if (!result && advice->mostly_read)
		result = advise(start, bytes, CU_MEM_ADVISE_SET_READ_MOSTLY, host);
	return result;
}

static void disown(struct unified *unified)
{
	pthread_mutex_lock(&lock);
	rest(unified);
	pthread_mutex_unlock(&lock);
}

/* Made, and freed */

static bool charge(struct device *device, uint64_t bytes)
{
	if (daemon_charge(device, bytes))
		return false;
	__atomic_add_fetch(&device->resident, bytes, __ATOMIC_RELAXED);
	__atomic_add_fetch(&device->managed, bytes, __ATOMIC_RELAXED);
	return true;
}

static bool add(struct unified *unified)
{
	struct unified **more;
	size_t place;

	pthread_mutex_lock(&lock);
	if (all_count == all_room) {
		more = realloc(all, (all_room * 2 + 16) * sizeof(*more));
		if (!more) {
			pthread_mutex_unlock(&lock);
			return false;
		}
		all = more;
		all_room = all_room * 2 + 16;
	}
	place = behind(unified->start);
	memmove(&all[place + 1], &all[place], (all_count - place) * sizeof(*all));
	all[place] = unified;
	__atomic_store_n(&known, ++all_count, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return true;
}

static void drop(struct unified *unified)
{
	free(unified->spans);
	free(unified);
}

/* Each piece by itself: for one that there is no room for, what came before it may go. */
static void charge_pieces(struct unified *unified)
{
	CUresult result;

	for (size_t i = 0; i < unified->count; i++) {
		const bool charged = charge(unified->device, piece_charge(unified, i));

		pthread_mutex_lock(&lock);
		while (unified->busy)	/* others of it go meanwhile */
			pthread_cond_wait(&rested, &lock);
		unified->busy = !charged;
		if (charged)
			unified->place[i] = ON_GPU;
		pthread_mutex_unlock(&lock);
		if (charged)
			continue;
		result = each_of(unified, i, keep_there);
		disown(unified);
		if (result)
			log_line("managed memory: no advice is taken, error %d: it is not limited", (int)result);
	}
}

static bool takes_advice(const struct device *device)
{
	int value = 0;

	return real.cuDeviceGetAttribute &&
	       !real.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, device->ordinal) && value;
}

bool unified_made(struct device *device, CUdeviceptr address, uint64_t bytes, CUcontext context)
{
	const size_t count = (bytes + PIECE - 1) / PIECE;
	CUstreamCaptureMode mode;
	struct unified *unified;
	bool whole, made;

	if (!device || !device->pool || bytes < GG_CHUNK || !daemon_knows_managed(device))
		return false;
	mode = driver_enter();
	made = takes_advice(device);
	unified = made ? calloc(1, sizeof(*unified) + count) : NULL;
	if (unified) {
		*unified = (struct unified){
			.device = device, .context = context, .start = address, .bytes = bytes, .count = count,
			.spans = calloc(1, sizeof(*unified->spans)), .span_count = 1, .span_room = 1, .busy = true,
		};
		memset(unified->place, REFUSED, count);
	}
	made = unified && unified->spans && add(unified);
	if (made) {
		unified->spans[0].start = address;
		whole = charge(device, round_up(bytes, GG_CHUNK));
		if (whole)
			memset(unified->place, ON_GPU, count);
		pthread_mutex_lock(&lock);
		rest(unified);	/* what has come by now may go */
		unified->touched = !whole;
		pthread_mutex_unlock(&lock);
		if (!whole)
			charge_pieces(unified);
		daemon_report(device);
	} else if (unified) {
		drop(unified);
	}
	driver_leave(mode);
	return made;
}

struct unified *unified_take(CUdeviceptr address)
{
	struct unified *unified;
	size_t place;

	if (!__atomic_load_n(&known, __ATOMIC_ACQUIRE))
		return NULL;
	pthread_mutex_lock(&lock);
	unified = resting(address);
	if (unified && unified->start == address) {
		place = behind(address) - 1;
		memmove(&all[place], &all[place + 1], (all_count - place - 1) * sizeof(*all));
		__atomic_store_n(&known, --all_count, __ATOMIC_RELEASE);
	} else {
		unified = NULL;
	}
	pthread_mutex_unlock(&lock);
	return unified;
}

void unified_taken(struct unified *taken, bool freed)
{
	uint64_t here = 0, there = 0;

	if (!taken)
		return;
	if (!freed) {
		if (!add(taken))
			drop(taken);	/* it stays charged until the process ends */
		return;
	}
	for (size_t i = 0; i < taken->count; i++) {
		here += taken->place[i] == ON_GPU ? piece_charge(taken, i) : 0;
		there += taken->place[i] == IN_HOST ? piece_charge(taken, i) : 0;
	}
	__atomic_sub_fetch(&taken->device->managed, here, __ATOMIC_RELAXED);
	pool_uncharge(taken->device, here);
	pool_uncharge_swapped(taken->device, there);
	daemon_report(taken->device);
	drop(taken);
}

static void context_gone(struct device *device, CUcontext context)
{
	CUdeviceptr found;

	(void)device;
	do {
		found = 0;
		pthread_mutex_lock(&lock);
		for (size_t i = 0; i < all_count && !found; i++)
			if (all[i]->context == context)
				found = all[i]->start;
		pthread_mutex_unlock(&lock);
		if (found)
			unified_taken(unified_take(found), true);
	} while (found);
}

/* What the program asks for */

bool unified_touched(CUdeviceptr address, uint64_t bytes)
{
	const struct unified *unified;
	bool touched;

	if (!bytes || !__atomic_load_n(&known, __ATOMIC_ACQUIRE))
		return false;
	pthread_mutex_lock(&lock);
	unified = at(address);
	touched = unified && unified->touched;
	pthread_mutex_unlock(&lock);
	return touched;
}

/* The allocation that a range begins in, to oneself; NULL: the driver is to be asked, as it is none, or as nothing of it was
 * in the host. `address` and `end` become those of its pages that are meant. */
static struct unified *own(CUdeviceptr *address, CUdeviceptr *end)
{
	struct unified *unified;

	if (!__atomic_load_n(&known, __ATOMIC_ACQUIRE))
		return NULL;
	pthread_mutex_lock(&lock);
	unified = resting(*address);
	if (unified && unified->touched && *end <= unified->start + round_up(unified->bytes, PAGE) &&
	    within(unified, address, end))
		unified->busy = true;
	else
		unified = NULL;
	pthread_mutex_unlock(&lock);
	return unified;
}

static bool is_advice(CUmem_advise advice)
{
	return advice >= CU_MEM_ADVISE_SET_READ_MOSTLY && advice <= CU_MEM_ADVISE_UNSET_ACCESSED_BY;
}

/* Where a run of pieces that are in the same state ends. */
static CUdeviceptr run_end(const struct unified *unified, CUdeviceptr address, CUdeviceptr end)
{
	size_t piece = (address - unified->start) / PIECE;
	const bool here = unified->place[piece] == ON_GPU;

	while (++piece < unified->count && (unified->place[piece] == ON_GPU) == here)
		;
	return piece < unified->count ? least(end, piece_start(unified, piece)) : end;
}

static bool is_here(const struct unified *unified, CUdeviceptr address)
{
	return unified->place[(address - unified->start) / PIECE] == ON_GPU;
}

bool unified_advise(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location, CUresult *result)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = is_advice(advice) ? own(&address, &end) : NULL;
	struct noted noted = { advice, location };
	CUstreamCaptureMode mode;

	if (!unified)
		return false;
	*result = CUDA_SUCCESS;
	mode = driver_enter();
	for (CUdeviceptr stop; !*result && address < end; address = stop) {
		stop = run_end(unified, address, end);
		/* What the host keeps is to stay there: that is noted, and holds once it may come. */
		if (is_here(unified, address) || advice == CU_MEM_ADVISE_SET_ACCESSED_BY)
			*result = advise(address, stop - address, advice, location);
		if (!*result) {
			pthread_mutex_lock(&lock);
			each_span(unified, address, stop, note_one, &noted);
			pthread_mutex_unlock(&lock);
		}
	}
	driver_leave(mode);
	disown(unified);
	return true;
}

/* Notes what the driver took, of whatever is ours of the range. */
static void note_range(CUdeviceptr address, uint64_t bytes, void (*visit)(struct advice *, void *), void *argument)
{
	struct unified *unified;

	if (!__atomic_load_n(&known, __ATOMIC_ACQUIRE))
		return;
	pthread_mutex_lock(&lock);
	unified = resting(address);
	if (unified)
		each_span(unified, address, address + bytes, visit, argument);
	pthread_mutex_unlock(&lock);
}

void unified_advised(CUdeviceptr address, uint64_t bytes, CUmem_advise advice, CUmemLocation location)
{
	struct noted noted = { advice, location };

	note_range(address, bytes, note_one, &noted);
}

void unified_prefetched(CUdeviceptr address, uint64_t bytes, CUmemLocation location)
{
	note_range(address, bytes, note_fetch, &location);
}

/* Lets a piece that is in the host come, if the daemon has room for it. By a thread that has the allocation. */
static bool let_come(struct unified *unified, size_t piece)
{
	struct device *device = unified->device;
	const uint64_t bytes = piece_charge(unified, piece);
	uint64_t credit, need;

	if (unified->place[piece] == REFUSED) {
		if (!charge(device, bytes))
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
	each_of(unified, piece, as_asked);
	unified->place[piece] = ON_GPU;
	return true;
}

void unified_fetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = location.type == CU_MEM_LOCATION_TYPE_DEVICE ? own(&address, &end) : NULL;
	CUstreamCaptureMode mode;
	bool comes, any = false;

	if (!unified)
		return;
	comes = location.id == unified->device->ordinal;
	mode = driver_enter();
	for (size_t i = (address - unified->start) / PIECE; comes && i < unified->count && piece_start(unified, i) < end; i++)
		if (unified->place[i] != ON_GPU)
			any |= comes = let_come(unified, i);
	driver_leave(mode);
	if (any)
		daemon_report(unified->device);
	disown(unified);
}

bool unified_prefetch(CUdeviceptr address, uint64_t bytes, CUmemLocation location, CUstream stream, bool per_thread,
		      CUresult *result)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = own(&address, &end);

	if (!unified)
		return false;
	*result = CUDA_SUCCESS;
	ours_enter();
	for (CUdeviceptr stop; !*result && address < end; address = stop) {
		stop = run_end(unified, address, end);
		if (is_here(unified, address) || location.type != CU_MEM_LOCATION_TYPE_DEVICE)
			*result = prefetch(address, stop - address, location, stream, per_thread);
		if (!*result) {
			pthread_mutex_lock(&lock);
			each_span(unified, address, stop, note_fetch, &location);
			pthread_mutex_unlock(&lock);
		}
	}
	ours_leave();
	disown(unified);
	return true;
}

/* Attributes */

/* A number for a place, as the older attributes have it. */
static int number_of(bool some, const CUmemLocation *location)
{
	return !some ? CU_DEVICE_INVALID : location->type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id :
	       location->type == CU_MEM_LOCATION_TYPE_HOST ? CU_DEVICE_CPU : CU_DEVICE_INVALID;
}

/* What all spans of a range agree on. */
struct agreed {
	bool first, mostly_read, prefers, fetched, by_host;
	CUmemLocation preferred, last;
	uint64_t by;
};

static void agree(struct advice *advice, void *argument)
{
	struct agreed *agreed = argument;

	if (agreed->first)
		*agreed = (struct agreed){
			false, advice->mostly_read, advice->prefers, advice->fetched, advice->by_host,
			advice->preferred, advice->last, advice->by,
		};
	agreed->mostly_read &= advice->mostly_read;
	agreed->prefers &= advice->prefers && same_place(&agreed->preferred, &advice->preferred);
	agreed->fetched &= advice->fetched && same_place(&agreed->last, &advice->last);
	agreed->by_host &= advice->by_host;
	agreed->by &= advice->by;
}

static void list_by(const struct agreed *agreed, int *numbers, size_t count)
{
	size_t i = 0;

	if (agreed->by_host && i < count)
		numbers[i++] = CU_DEVICE_CPU;
	for (int ordinal = 0; ordinal < GG_ORDINALS && i < count; ordinal++)
		if (agreed->by >> ordinal & 1)
			numbers[i++] = ordinal;
	while (i < count)
		numbers[i++] = CU_DEVICE_INVALID;
}

static CUresult answer(const struct agreed *agreed, CUmem_range_attribute attribute, int *number, size_t size)
{
	if (size < sizeof(*number) || size % sizeof(*number) ||
	    (size != sizeof(*number) && attribute != CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY))
		return CUDA_ERROR_INVALID_VALUE;
	switch (attribute) {
	case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY: *number = agreed->mostly_read; break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION: *number = number_of(agreed->prefers, &agreed->preferred); break;
	case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY: list_by(agreed, number, size / sizeof(*number)); break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION: *number = number_of(agreed->fetched, &agreed->last); break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
		*number = agreed->prefers ? (int)agreed->preferred.type : (int)CU_MEM_LOCATION_TYPE_INVALID;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID: *number = agreed->prefers ? agreed->preferred.id : 0; break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
		*number = agreed->fetched ? (int)agreed->last.type : (int)CU_MEM_LOCATION_TYPE_INVALID;
		break;
	case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID: *number = agreed->fetched ? agreed->last.id : 0; break;
	default: return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

bool unified_attribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address, uint64_t bytes,
		       CUresult *result)
{
	CUdeviceptr end = address + bytes;
	struct unified *unified = data && bytes ? own(&address, &end) : NULL;
	struct agreed agreed = { .first = true };

	if (!unified)
		return false;
	pthread_mutex_lock(&lock);
	each_span(unified, address, end, agree, &agreed);
	pthread_mutex_unlock(&lock);
	disown(unified);
	*result = answer(&agreed, attribute, data, size);
	return true;
}

/* Out and in */

/* The next allocation behind an address that has a piece in a place, to oneself, without waiting; NULL: there is none. */
static struct unified *next_with(const struct device *device, CUdeviceptr address, enum place place)
{
	struct unified *found = NULL;

	pthread_mutex_lock(&lock);
	for (size_t i = behind(address); i < all_count && !found; i++)
		if (all[i]->device == device && !all[i]->busy && memchr(all[i]->place, place, all[i]->count))
			found = all[i];
	if (found)
		found->busy = true;
	pthread_mutex_unlock(&lock);
	return found;
}

/* Those at the end first: programs begin at the beginning. */
static uint64_t out_of(struct unified *unified, uint64_t bytes, uint64_t until)
{
	struct device *device = unified->device;
	uint64_t moved = 0;

	for (size_t i = unified->count; i-- > 0 && moved < bytes && moment_us() < until;) {
		if (unified->place[i] != ON_GPU)
			continue;
		if (each_of(unified, i, keep_there) ||
		    prefetch(piece_start(unified, i), piece_bytes(unified, i), host, ways[device->ordinal].stream, false)) {
			each_of(unified, i, as_asked);	/* as far as it went */
			break;
		}
		unified->place[i] = IN_HOST;
		__atomic_sub_fetch(&device->managed, piece_charge(unified, i), __ATOMIC_RELAXED);
		moved += piece_charge(unified, i);
	}
	if (moved) {
		wait_for(device);
		pool_credit(device, moved);
		pthread_mutex_lock(&lock);
		unified->touched = true;
		pthread_mutex_unlock(&lock);
	}
	return moved;
}

uint64_t unified_out(struct device *device, uint64_t bytes)
{
	const uint64_t until = moment_us() + OUT_US;
	CUdeviceptr behind_here = 0;
	struct unified *unified;
	CUstreamCaptureMode mode;
	uint64_t moved = 0;

	if (!device->pool || !__atomic_load_n(&known, __ATOMIC_ACQUIRE))
		return 0;
	mode = driver_enter();
	if (device_borrow(device)) {
		while (have_way(device) && moved < bytes && moment_us() < until &&
		       (unified = next_with(device, behind_here, ON_GPU))) {
			behind_here = unified->start;
			moved += out_of(unified, bytes - moved, until);
			disown(unified);
		}
		device_return(device);
	}
	driver_leave(mode);
	if (moved)
		daemon_report(device);
	return moved;
}

uint64_t unified_in(struct device *device, uint64_t bytes)
{
	CUdeviceptr behind_here = 0;
	struct unified *unified;
	CUstreamCaptureMode mode;
	uint64_t moved = 0;
	bool comes = true;

	if (!device->pool || !__atomic_load_n(&known, __ATOMIC_ACQUIRE))
		return 0;
	mode = driver_enter();
	if (device_borrow(device)) {
		while (comes && have_way(device) && moved < bytes &&
		       (unified = next_with(device, behind_here, IN_HOST))) {
			behind_here = unified->start;
			for (size_t i = 0; i < unified->count && comes && moved < bytes; i++) {
				if (unified->place[i] != IN_HOST)
					continue;
				comes = let_come(unified, i);
				if (!comes)
					break;
				moved += piece_charge(unified, i);
				prefetch(piece_start(unified, i), piece_bytes(unified, i), gpu_of(device),
					 ways[device->ordinal].stream, false);
			}
			disown(unified);
		}
		device_return(device);
	}
	driver_leave(mode);
	if (moved)
		daemon_report(device);
	return moved;
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	rested = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
	all = NULL;
	all_count = all_room = 0;
	known = 0;
	memset(ways, 0, sizeof(ways));
}

LIFE(.stage = LIFE_FOREIGN, .context_gone = context_gone, .forget = forget);
