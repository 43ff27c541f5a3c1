// SPDX-License-Identifier: Apache-2.0
#include "double.h"

#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>

#include "daemon.h"
#include "exchange.h"
#include "lent.h"
#include "life.h"
#include "moment.h"
#include "mover.h"
#include "ours.h"
#include "sight.h"
#include "space.h"

/* Calls for one order, where each takes all of its time. */
#define CALLS_MOST 30
/* Microseconds after which books that differ are wrong. */
#define AGREE_US 10000000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint64_t resident, swapped, limit = UINT64_MAX;
static bool swap = true;
static uint64_t moved_out, moved_in;
static unsigned int reclaims;
static struct device *known;

/* What the thread is to do: one thing at a time. */
static enum { NOTHING, OUT, IN, EXCHANGE, TICK, PREPARE } order;
static struct device *order_device;
static uint64_t order_bytes, order_moved;
static bool taken, running;
static __thread bool ticks;	/* it is that thread, which does what exchange_tick does */
static uint64_t away;	/* atomically: the most that was said of it */

static void *listen_to(void *argument)
{
	(void)argument;
	ours_enter();
	pthread_mutex_lock(&lock);
	for (;;) {
		uint64_t moved, usec, bytes = order_bytes;
		const int what = order;

		if (what == NOTHING) {
			pthread_cond_wait(&changed, &lock);
			continue;
		}
		pthread_mutex_unlock(&lock);
		ticks = what == TICK;
		moved = what == OUT ? mover_out(order_device, bytes, &usec) :
			what == IN  ? mover_in(order_device, bytes, &usec) :
			what == PREPARE ? mover_prepare(order_device, bytes, &usec) :
			what == TICK ? (uint64_t)exchange_tick(order_device) :
				       mover_exchange(order_device, bytes, &usec);
		if (what == EXCHANGE)
			__atomic_store_n(&order_device->away, 0, __ATOMIC_RELAXED);
		pthread_mutex_lock(&lock);
		moved_out += what == OUT || what == EXCHANGE ? moved : 0;
		moved_in += what == IN || what == EXCHANGE ? moved : 0;
		if (what == OUT) {
			moved = mover_booked(order_device);
			CHECK(moved <= resident);
			resident -= moved;
			swapped += moved;
			reclaims++;
		}
		order_moved = moved;
		order = NOTHING;
		pthread_cond_broadcast(&changed);
	}
	return NULL;
}

static uint64_t carry_out(int what, struct device *device, uint64_t bytes)
{
	uint64_t moved;

	pthread_mutex_lock(&lock);
	while (taken)
		pthread_cond_wait(&changed, &lock);
	taken = true;
	order_device = device;
	order_bytes = bytes;
	order = what;
	pthread_cond_broadcast(&changed);
	while (order != NOTHING)
		pthread_cond_wait(&changed, &lock);
	moved = order_moved;
	taken = false;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	return moved;
}

/*
 * As the daemon, it asks again where a call has taken all of its time (mover.c, CALL_US): on a busy
 * machine that is no matter of bytes.
 */
static uint64_t carry_out_whole(int what, struct device *device, uint64_t bytes)
{
	uint64_t moved = 0;

	for (int call = 0; call < CALLS_MOST && moved < bytes; call++) {
		const uint64_t began = moment_us();

		moved += carry_out(what, device, bytes - moved);
		if (moment_us() - began < CALL_US)
			break;
	}
	return moved;
}

static void device_known(struct device *device)
{
	pthread_t thread;

	if (!running)
		running = !pthread_create(&thread, NULL, listen_to, NULL);
	CHECK(running);
	device->index = 0;
	if (!known)	/* the one that the books are about: another is a peer of it */
		known = device;
}

LIFE(.stage = LIFE_DAEMON, .known = device_known);

static uint64_t excess(void)
{
	pthread_mutex_lock(&lock);
	uint64_t over = resident > limit ? resident - limit : 0;
	pthread_mutex_unlock(&lock);
	return over;
}

static void reclaim(struct device *device)
{
	uint64_t over;

	for (int try = 0; try < 10 && swap && (over = excess()); try++)
		carry_out(OUT, device, over);
}

int daemon_charge(struct device *device, uint64_t bytes)
{
	CHECK(bytes && bytes % GG_CHUNK == 0);
	pthread_mutex_lock(&lock);
	if (!swap && resident + bytes > limit) {
		pthread_mutex_unlock(&lock);
		return ENOMEM;
	}
	resident += bytes;
	pthread_mutex_unlock(&lock);
	reclaim(device);
	return 0;
}

void daemon_uncharge(struct device *device, uint64_t from_resident, uint64_t from_swapped)
{
	(void)device;
	pthread_mutex_lock(&lock);
	CHECK(from_resident <= resident && from_swapped <= swapped);
	resident -= from_resident;
	swapped -= from_swapped;
	pthread_mutex_unlock(&lock);
}

int daemon_move_in(struct device *device, uint64_t bytes)
{
	int result = EAGAIN;

	(void)device;
	pthread_mutex_lock(&lock);
	CHECK(bytes && bytes <= swapped);
	if (resident + bytes <= limit) {
		resident += bytes;
		swapped -= bytes;
		result = 0;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

/* As with an older daemon. */
bool daemon_knows_managed(struct device *device)
{
	(void)device;
	return false;
}

bool daemon_limits(struct device *device, uint64_t *total, uint64_t *left)
{
	(void)device;
	pthread_mutex_lock(&lock);
	*total = limit;
	*left = limit > resident ? limit - resident : 0;
	pthread_mutex_unlock(&lock);
	return true;
}

/* As with an older daemon: the limit of the moment counts. */
bool sight_looked(CUdevice ordinal)
{
	(void)ordinal;
	return true;
}

bool sight_kept(CUdevice ordinal, uint64_t *most)
{
	(void)ordinal;
	(void)most;
	return false;
}

void sight_look(CUdevice ordinal, const CUuuid *uuid)
{
	(void)ordinal;
	(void)uuid;
}

bool sight_view(const CUuuid *uuid, struct sight *sight)
{
	(void)uuid;
	(void)sight;
	return false;
}

void sight_forget(void)
{
}

void space_enter(void)
{
}

void space_forget(void)
{
}

void daemon_report(struct device *device)
{
	/* Others are in the middle of something; and mover_exchange alone leaves the rest to its caller. */
	if (ticks && device->away) {
		/* Said before it is. */
		CHECK(device->away <= device->resident);
		double_agree(device);
		if (device->away > double_away())
			__atomic_store_n(&away, device->away, __ATOMIC_RELAXED);
	}
}

void double_limit(uint64_t bytes)
{
	bool raised;

	pthread_mutex_lock(&lock);
	raised = bytes > limit;
	limit = bytes;
	pthread_mutex_unlock(&lock);
	if (raised && known)
		carry_out_whole(IN, known, UINT64_MAX);
	else if (known)
		reclaim(known);
}

void double_bound(uint64_t bytes)
{
	pthread_mutex_lock(&lock);
	limit = bytes;
	pthread_mutex_unlock(&lock);
}

void double_swap(bool allowed)
{
	swap = allowed;
}

uint64_t double_out(struct device *device, uint64_t bytes)
{
	return carry_out_whole(OUT, device, bytes);
}

uint64_t double_in(struct device *device, uint64_t bytes)
{
	return carry_out_whole(IN, device, bytes);
}

uint64_t double_prepare(struct device *device, uint64_t bytes)
{
	return carry_out_whole(PREPARE, device, bytes);
}

uint64_t double_exchange(struct device *device, uint64_t bytes)
{
	return carry_out(EXCHANGE, device, bytes);
}

void double_tick(struct device *device)
{
	carry_out(TICK, device, 0);
}

uint64_t double_away(void)
{
	return __atomic_load_n(&away, __ATOMIC_RELAXED);
}

unsigned int double_reclaims(void)
{
	pthread_mutex_lock(&lock);
	unsigned int count = reclaims;
	pthread_mutex_unlock(&lock);
	return count;
}

struct double_moved double_moved(void)
{
	pthread_mutex_lock(&lock);
	const struct double_moved moved = { moved_out, moved_in };
	pthread_mutex_unlock(&lock);
	return moved;
}

static bool agrees(struct device *device, bool say)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	void (*usage)(int, uint64_t *, uint64_t *, uint64_t *) = driver_dlsym(library, "fake_memory_usage");
	uint64_t gpu, host, addresses, credit = pool_credited(device);
	const uint64_t on_gpu = __atomic_load_n(&device->resident, __ATOMIC_RELAXED);
	const uint64_t in_host = __atomic_load_n(&device->swapped, __ATOMIC_RELAXED);
	uint64_t (*lent)(int) = driver_dlsym(library, "fake_memory_lent");
	uint64_t booked_gpu, booked_host, others;

	lent_sweep();
	others = lent(device->ordinal);
	pthread_mutex_lock(&lock);
	booked_gpu = resident;
	booked_host = swapped;
	pthread_mutex_unlock(&lock);
	usage(device->ordinal, &gpu, &host, &addresses);
	if (__atomic_load_n(&device->lent, __ATOMIC_RELAXED) != others) {
		if (say)
			fprintf(stderr, "others may have %llu MiB, of which the device says %llu\n",
				(unsigned long long)(others >> 20), (unsigned long long)(device->lent >> 20));
		return false;
	}
	if (gpu + others + credit == on_gpu && on_gpu == booked_gpu && in_host == booked_host &&
	    host == in_host + credit + host_kept(device) + __atomic_load_n(&device->clean, __ATOMIC_RELAXED) &&
	    host == __atomic_load_n(&device->host_held, __ATOMIC_RELAXED))
		return true;
	if (say)
		fprintf(stderr,
			"the driver has %llu MiB on the GPU and %llu in the host; the device says %llu and %llu, the "
			"books %llu and %llu; kept %llu and %llu, credit %llu; clean %llu, held %llu of the host\n",
			(unsigned long long)(gpu >> 20),
			(unsigned long long)(host >> 20), (unsigned long long)(on_gpu >> 20),
			(unsigned long long)(in_host >> 20), (unsigned long long)(booked_gpu >> 20),
			(unsigned long long)(booked_host >> 20), (unsigned long long)(pool_kept(device) >> 20),
			(unsigned long long)(host_kept(device) >> 20), (unsigned long long)(credit >> 20),
			(unsigned long long)(__atomic_load_n(&device->clean, __ATOMIC_RELAXED) >> 20),
			(unsigned long long)(__atomic_load_n(&device->host_held, __ATOMIC_RELAXED) >> 20));
	return false;
}

void double_agree(struct device *device)
{
	const uint64_t until = moment_us() + AGREE_US;

	/* What the library gives back or makes by itself is under way for a moment, and may be again in the next. */
	while (!agrees(device, false)) {
		if (moment_us() >= until && !agrees(device, true))
			exit(1);
		usleep(1000);
	}
}
