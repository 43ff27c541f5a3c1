// SPDX-License-Identifier: Apache-2.0
#include "timed.h"

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"
#include "memory.h"

#define PROGRAMS 16
#define US UINT64_C(1000)
/* What is over so soon is not slept for: the thread would be late. */
#define BRIEF (100 * US)
/* For so long a program has the engine that has nothing to do, if another wants it: it may be about to launch. */
#define IDLE (30 * US)
/* Bytes that go over the bus at once: what others read there comes in between. */
#define PART (UINT64_C(8) << 20)
/* A thread that is late by no more has been in time. */
#define LATE (300 * US)

/* The layout of timed.py. All times are CLOCK_MONOTONIC, ns; rates are bytes a second, 0 for no limit. */
struct program {
	uint32_t pid, off;		/* `off`: its kernels do not run */
	uint64_t busy, stays;		/* on the engine; how often it came there */
	uint64_t passes;		/* the program's own count */
	uint32_t wants, stop;
	uint64_t slice;			/* its longest run in a round */
	uint64_t read[2];		/* bytes that its kernels read of the GPU, and over the bus */
};

static struct page {
	uint64_t rate[2], memory_rate, switch_ns;
	struct {
		uint64_t ns, bytes_ns;	/* of a call, and of each 64 MiB of it */
	} call[FAKE_CALLS][2];
	uint64_t free[2];		/* each way of the bus, from then on */
	uint64_t carried[2], waited[2];	/* bytes, and ns for which they waited for others */
	uint64_t driver_free, driver_busy, driver_waited;
	uint32_t lock, owner;		/* of the engine; the number of a program and one more */
	uint64_t engine_free, slice_until;
	struct program program[PROGRAMS];
} *page;
static unsigned int own;	/* number of this program */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_page(void)
{
	const char *path = getenv("FAKE_TIMED");
	const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	void *mapped;

	if (!path)
		return;
	mapped = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	if (mapped == MAP_FAILED)
		fake_die("FAKE_TIMED: %s", path);
	page = mapped;
	for (own = 0; own < PROGRAMS; own++) {
		uint32_t none = 0;

		if (__atomic_load_n(&page->program[own].pid, __ATOMIC_RELAXED) == (uint32_t)getpid() ||
		    __atomic_compare_exchange_n(&page->program[own].pid, &none, (uint32_t)getpid(), false,
						__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
			return;
	}
	fake_die("FAKE_TIMED: too many programs");
}

bool fake_timed(void)
{
	pthread_once(&once, open_page);
	return page;
}

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void sleep_until(uint64_t until)
{
	const struct timespec time = { (time_t)(until / 1000000000), (long)(until % 1000000000) };

	if (until > now() + BRIEF)
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
}

/* Has something for so long from `begun` on, behind those that had asked for it; returns until when. */
static uint64_t take(uint64_t *at, uint64_t begun, uint64_t ns, uint64_t *waited)
{
	uint64_t before = __atomic_load_n(at, __ATOMIC_SEQ_CST), start;

	do
		start = before > begun ? before : begun;
	while (!__atomic_compare_exchange_n(at, &before, start + ns, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	if (waited)
		__atomic_add_fetch(waited, start - begun, __ATOMIC_RELAXED);
	return start + ns;
}

static uint64_t at_rate(uint64_t bytes, uint64_t rate)
{
	return rate ? bytes * 1000 / (rate / 1000000) : 0;
}

/* Part by part, so that others have the bus in between. A stream has its next copy begin as the last one ends. */
static uint64_t carry(int way, uint64_t bytes)
{
	static __thread uint64_t last;
	const uint64_t time = now();
	uint64_t until = time < last + LATE ? last : time;

	for (uint64_t left = bytes, part; left; left -= part) {
		part = left < PART ? left : PART;
		until = take(&page->free[way], until, at_rate(part, page->rate[way]), &page->waited[way]);
		__atomic_add_fetch(&page->carried[way], part, __ATOMIC_RELAXED);
		if (left > part)
			sleep_until(until - 2 * at_rate(part, page->rate[way]));
	}
	return last = until;
}

void fake_timed_copy(int way, uint64_t bytes)
{
	sleep_until(carry(way, bytes));
}

void fake_timed_call(enum fake_call call, bool host, uint64_t bytes)
{
	uint64_t ns;

	if (!fake_timed())
		return;
	ns = page->call[call][host].ns + page->call[call][host].bytes_ns * (bytes >> 20) / 64;
	__atomic_add_fetch(&page->driver_busy, ns, __ATOMIC_RELAXED);
	sleep_until(take(&page->driver_free, now(), ns, &page->driver_waited));
}

/* The engine */

static void lock(void)
{
	uint32_t none = 0;

	while (!__atomic_compare_exchange_n(&page->lock, &none, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
		none = 0;
		sched_yield();
	}
}

static void unlock(void)
{
	__atomic_store_n(&page->lock, 0, __ATOMIC_RELEASE);
}

static bool is_off(unsigned int which)
{
	return __atomic_load_n(&page->program[which].off, __ATOMIC_ACQUIRE);
}

/* The one that comes next of those that want the engine; PROGRAMS: none does. With the lock. */
static unsigned int next_one(void)
{
	const unsigned int from = page->owner ? page->owner - 1 : 0;

	for (unsigned int i = 1; i <= PROGRAMS; i++) {
		const unsigned int which = (from + i) % PROGRAMS;

		if (page->program[which].wants && !is_off(which))
			return which;
	}
	return PROGRAMS;
}

/* Whether this one has the engine, from page->engine_free on. With the lock. */
static bool has_engine(uint64_t time)
{
	const unsigned int owner = page->owner ? page->owner - 1 : PROGRAMS;

	if (is_off(own))
		return false;
	if (owner == own && (time < page->slice_until || next_one() == own)) {
		if (time >= page->slice_until)
			page->slice_until = time + page->program[own].slice;
		return true;
	}
	if (owner < PROGRAMS && owner != own && !is_off(owner) && page->program[owner].pid) {
		if (page->program[owner].wants && time < page->slice_until)
			return false;
		if (!page->program[owner].wants && time < page->engine_free + IDLE)
			return false;
	}
	if (next_one() != own)
		return false;
	page->owner = own + 1;
	page->engine_free = (time > page->engine_free ? time : page->engine_free) + page->switch_ns;
	page->slice_until = page->engine_free + page->program[own].slice;
	page->program[own].stays++;
	return true;
}

/* Has the engine for some time, at most so long; what is left. */
static uint64_t run_some(uint64_t ns)
{
	struct program *program = &page->program[own];
	uint64_t time, start, part;

	for (;;) {
		lock();
		time = now();
		if (has_engine(time))
			break;
		unlock();
		usleep(50);
	}
	start = page->engine_free;
	if (start + LATE < time)
		start = time;
	part = page->slice_until > start ? page->slice_until - start : 0;
	part = part < ns ? part : ns;
	part = part < 1000 * US ? part : 1000 * US;
	if (!part)
		page->slice_until = 0;
	page->engine_free = start + part;
	program->busy += part;
	unlock();
	sleep_until(start + part);
	return ns - part;
}

void fake_timed_kernel(uint64_t ns, uint64_t gpu_bytes, uint64_t host_bytes)
{
	struct program *program;
	uint64_t left;

	if (!fake_timed())
		return;
	program = &page->program[own];
	__atomic_store_n(&program->wants, 1, __ATOMIC_RELEASE);
	__atomic_add_fetch(&program->read[0], gpu_bytes, __ATOMIC_RELAXED);
	__atomic_add_fetch(&program->read[1], host_bytes, __ATOMIC_RELAXED);
	for (left = ns + at_rate(gpu_bytes, page->memory_rate); left;)
		left = run_some(left);
	/* What comes over the bus has the engine for as long as that takes, beside what others carry. */
	for (uint64_t part; host_bytes; host_bytes -= part) {
		part = host_bytes < PART ? host_bytes : PART;
		for (left = at_rate(part, page->rate[1]); left;)
			left = run_some(left);
		left = take(&page->free[1], now(), at_rate(part, page->rate[1]), &page->waited[1]);
		__atomic_add_fetch(&page->carried[1], part, __ATOMIC_RELAXED);
		for (uint64_t time = now(); left > time + BRIEF; time = now())
			run_some(left - time);
	}
	__atomic_store_n(&program->wants, 0, __ATOMIC_RELEASE);
}

/* For programs of tests: a kernel that reads what is there. */
__attribute__((visibility("default"))) void fake_timed_read(CUdeviceptr address, uint64_t bytes)
{
	uint64_t host = 0;

	for (uint64_t at = 0, many; at < bytes; at += many)
		if (fake_memory_in_host(address + at, bytes - at, &many))
			host += many;
	fake_timed_kernel(0, bytes - host, host);
}

/* ... that takes so long. */
__attribute__((visibility("default"))) void fake_timed_run(uint64_t ns)
{
	fake_timed_kernel(ns, 0, 0);
}

/* What this program has done; true: it is to stop. */
__attribute__((visibility("default"))) bool fake_timed_passes(uint64_t passes)
{
	if (!fake_timed())
		return false;
	__atomic_store_n(&page->program[own].passes, passes, __ATOMIC_RELAXED);
	return __atomic_load_n(&page->program[own].stop, __ATOMIC_RELAXED);
}
