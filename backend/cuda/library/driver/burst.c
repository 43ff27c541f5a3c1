// SPDX-License-Identifier: Apache-2.0
/*
 * Pages are mapped at fixed places and never unmapped, since a thread may be about to read or write there. A page that
 * is no longer used is replaced by memory of the process, in one call. A waiting thread sleeps in futex(2) on the word
 * of the program that it goes behind, which it can only read, until the time in it; it is woken if that time is brought
 * forward.
 *
 * `lock` is taken while no other lock is held.
 */

#include "burst.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "counters.h"
#include "driver.h"
#include "glibc.h"
#include "hold.h"
#include "life.h"
#include "log.h"
#include "moment.h"
#include "totals.h"

#define PAGE 4096
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "futex(2) is about the first half of a word");

static struct lead {
	struct burst_page *page;	/* atomically; NULL: there has never been one */
	struct device *device;		/* atomically */
	bool leads;			/* atomically */
	bool busy;			/* atomically: the listening thread has to look at it */
	uint64_t after_ns;		/* atomically */
} leads[GG_ORDINALS];

static struct follow {
	char *pages;			/* atomically: BURST_LEADERS of them, side by side; NULL: never any */
	unsigned int slots;		/* atomically: a bit for each page that belongs to another program */
	unsigned int waiting;		/* atomically */
	struct allowance allowance;	/* under `lock` */
} follows[GG_ORDINALS];

unsigned int burst_leading;
void (*burst_wake)(void);
static bool watching;		/* atomically: the listening thread will look again soon anyway */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* mmap(2) over memory that other threads may be reading or writing; the kernel shows them either the old or the new
 * page. The wrapper of the C library would count as a write of the whole range to ThreadSanitizer. */
static bool replace(void *at, size_t bytes, int protection, int flags, int fd)
{
	return syscall(SYS_mmap, at, bytes, protection, flags | MAP_FIXED, fd, 0L) != -1;
}

/* Maps memory of the process, at `at` unless that is NULL; NULL on failure. */
static void *map_own(void *at, size_t bytes, int protection)
{
	void *mapped;

	if (at)
		return replace(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1) ? at : NULL;
	mapped = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return mapped == MAP_FAILED ? NULL : mapped;
}

/* Maps the daemon's page over memory of the process. A file that could be truncated is refused: it would end the
 * program (SIGBUS). */
static bool map_page(void *at, int fd, int protection)
{
	struct stat status;

	if (glibc_fstat(fd, &status) || status.st_size < PAGE || fcntl(fd, F_GET_SEALS) < 0 ||
	    !(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK))
		return false;
	return replace(at, PAGE, protection, MAP_SHARED, fd);
}

/* Programs that go before others */

static void say(struct lead *lead, uint64_t until)
{
	__atomic_store_n(&lead->page->until, until, __ATOMIC_RELEASE);
}

/* Wakes the threads that sleep until the time in the previous word. */
static void wake_them(struct lead *lead)
{
	syscall(SYS_futex, &lead->page->until, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void count_leads(void)
{
	unsigned int any = 0;

	for (size_t i = 0; i < GG_ORDINALS; i++)
		any += __atomic_load_n(&leads[i].leads, __ATOMIC_RELAXED);
	__atomic_store_n(&burst_leading, any, __ATOMIC_RELAXED);
}

bool burst_lead(struct device *device, int fd, uint64_t after_us)
{
	struct lead *lead = &leads[device->ordinal];
	bool leads_now = false;

	if (fd >= 0 || lead->page) {
		if (!lead->page)
			__atomic_store_n(&lead->page, map_own(NULL, PAGE, PROT_READ | PROT_WRITE), __ATOMIC_RELEASE);
		if (!lead->page)
			return false;
		if (__atomic_load_n(&lead->leads, __ATOMIC_RELAXED)) {
			say(lead, 0);
			wake_them(lead);
		}
		leads_now = fd >= 0 && map_page(lead->page, fd, PROT_READ | PROT_WRITE);
		if (!leads_now)
			map_own(lead->page, PAGE, PROT_READ | PROT_WRITE);
	}
	__atomic_store_n(&lead->device, device, __ATOMIC_RELAXED);
	__atomic_store_n(&lead->after_ns,
			 (after_us < HOLD_AFTER_US_MOST ? after_us : HOLD_AFTER_US_MOST) * HOLD_NS_A_US,
			 __ATOMIC_RELAXED);
	/* Have work that is already pending looked at. */
	__atomic_store_n(&lead->busy, leads_now, __ATOMIC_SEQ_CST);
	__atomic_store_n(&lead->leads, leads_now, __ATOMIC_SEQ_CST);
	count_leads();
	if (leads_now)
		moment_punctual();
	log_line("device %d: %s", device->ordinal, leads_now ? "others go behind" : "none goes behind");
	return leads_now || fd < 0;
}

void burst_begin(struct device *device)
{
	struct lead *lead = &leads[device->ordinal];
	const uint64_t now = now_ns();
	void (*wake)(void);
	uint64_t until;

	if (!__atomic_load_n(&lead->leads, __ATOMIC_ACQUIRE))
		return;
	until = __atomic_load_n(&lead->page->until, __ATOMIC_RELAXED);
	if (!hold_left(until, now))
		__atomic_add_fetch(&lead->page->periods, 1, __ATOMIC_RELAXED);
	if (hold_is_due(until, now))
		say(lead, hold_word(now, true, 0));
	if (__atomic_load_n(&lead->busy, __ATOMIC_SEQ_CST) || __atomic_exchange_n(&lead->busy, true, __ATOMIC_SEQ_CST))
		return;
	/* Without this, each request of a burst would cost a write to a pipe and a thread that wakes up. */
	if (__atomic_load_n(&watching, __ATOMIC_SEQ_CST))
		return;
	wake = __atomic_load_n(&burst_wake, __ATOMIC_ACQUIRE);
	if (wake)
		wake();
}

static bool is_pending(const struct device *device)
{
	uint64_t submitted, finished;

	totals_get(device, &submitted, &finished);
	return submitted > finished;
}

static bool is_busy(const struct lead *lead)
{
	return __atomic_load_n(&lead->leads, __ATOMIC_SEQ_CST) && __atomic_load_n(&lead->busy, __ATOMIC_SEQ_CST);
}

/* Publishes whether anything is pending, as far as is known, and returns that. */
static bool tell(struct lead *lead)
{
	bool pending;

	/* Cleared before the look: a launch made meanwhile sets it again, after it has been counted. */
	__atomic_store_n(&lead->busy, false, __ATOMIC_SEQ_CST);
	pending = is_pending(__atomic_load_n(&lead->device, __ATOMIC_RELAXED));
	if (pending)
		__atomic_store_n(&lead->busy, true, __ATOMIC_SEQ_CST);
	/* The program was busy when others came to go behind it, so no launch has begun this period. */
	if (pending && !__atomic_load_n(&lead->page->until, __ATOMIC_RELAXED))
		__atomic_add_fetch(&lead->page->periods, 1, __ATOMIC_RELAXED);
	say(lead, hold_word(now_ns(), pending, __atomic_load_n(&lead->after_ns, __ATOMIC_RELAXED)));
	if (!pending)
		wake_them(lead);
	return pending;
}

/* Whether others are still held after its last request; either the next one comes soon, or the others go on. */
static bool is_over_soon(const struct lead *lead)
{
	return __atomic_load_n(&lead->leads, __ATOMIC_SEQ_CST) &&
	       hold_left(__atomic_load_n(&lead->page->until, __ATOMIC_RELAXED), now_ns());
}

bool burst_tick(void)
{
	bool any = false;

	for (size_t i = 0; __atomic_load_n(&burst_leading, __ATOMIC_RELAXED) && i < GG_ORDINALS; i++) {
		if (!is_busy(&leads[i])) {
			any |= is_over_soon(&leads[i]);
			continue;
		}
		counters_drain(__atomic_load_n(&leads[i].device, __ATOMIC_RELAXED));
		tell(&leads[i]);
		any = true;
	}
	__atomic_store_n(&watching, any, __ATOMIC_SEQ_CST);
	/* Work that began before `watching` was cleared woke no thread. */
	for (size_t i = 0; !any && __atomic_load_n(&burst_leading, __ATOMIC_RELAXED) && i < GG_ORDINALS; i++)
		any |= is_busy(&leads[i]);
	return any;
}

void burst_end_of_wait(void)
{
	const CUstreamCaptureMode mode = driver_enter();

	for (size_t i = 0; i < GG_ORDINALS; i++)
		if (is_busy(&leads[i]) && counters_progress(__atomic_load_n(&leads[i].device, __ATOMIC_RELAXED)))
			tell(&leads[i]);
	driver_leave(mode);
}

/* Programs that go behind others */

bool burst_follow(struct device *device, unsigned int slot, int fd)
{
	struct follow *follow = &follows[device->ordinal];
	const unsigned int bit = slot < BURST_LEADERS ? 1U << slot : 0;
	unsigned int slots = __atomic_load_n(&follow->slots, __ATOMIC_RELAXED);
	char *pages = follow->pages;

	if (!pages && fd >= 0) {
		pages = map_own(NULL, (size_t)BURST_LEADERS * PAGE, PROT_READ);
		__atomic_store_n(&follow->pages, pages, __ATOMIC_RELEASE);
	}
	if (!pages || !bit)
		return slots;
	if (fd >= 0 && map_page(pages + (size_t)slot * PAGE, fd, PROT_READ)) {
		slots |= bit;
	} else {
		map_own(pages + (size_t)slot * PAGE, PAGE, PROT_READ);
		slots &= ~bit;
	}
	__atomic_store_n(&follow->slots, slots, __ATOMIC_SEQ_CST);
	log_line("device %d: goes behind others: %#x", device->ordinal, slots);
	return slots;
}

/* Returns the page whose word holds the program for longest from `now` on; NULL: none does. */
static const struct burst_page *latest(const struct follow *follow, uint64_t now, uint64_t *word)
{
	unsigned int slots = __atomic_load_n(&follow->slots, __ATOMIC_ACQUIRE);
	const char *pages = __atomic_load_n(&follow->pages, __ATOMIC_ACQUIRE);
	const struct burst_page *found = NULL;

	for (*word = 0; slots; slots &= slots - 1) {
		const struct burst_page *page = (const void *)(pages + (size_t)__builtin_ctz(slots) * PAGE);
		const uint64_t until = __atomic_load_n(&page->until, __ATOMIC_ACQUIRE);

		if (hold_left(until, now) && (!found || until > *word)) {
			found = page;
			*word = until;
		}
	}
	return found;
}

/* Returns for how long the program is held from now on, at most; 0: it is not held. */
static uint64_t held_for(struct follow *follow, bool was_held, const struct burst_page **page, uint64_t *word)
{
	uint64_t now, left, may;

	pthread_mutex_lock(&lock);
	now = now_ns();
	allowance_observe(&follow->allowance, now, was_held || __atomic_load_n(&follow->waiting, __ATOMIC_RELAXED));
	may = allowance_left(&follow->allowance, now);
	pthread_mutex_unlock(&lock);
	*page = latest(follow, now, word);
	left = *page ? hold_left(*word, now) : 0;
	return left < may ? left : may;
}

bool burst_holds(CUdevice ordinal)
{
	struct follow *follow = &follows[ordinal];
	const struct burst_page *page;
	uint64_t word;

	return __atomic_load_n(&follow->slots, __ATOMIC_RELAXED) && held_for(follow, false, &page, &word);
}

uint64_t burst_held_until(CUdevice ordinal)
{
	const struct follow *follow = &follows[ordinal];
	unsigned int slots = __atomic_load_n(&follow->slots, __ATOMIC_ACQUIRE);
	const char *pages = __atomic_load_n(&follow->pages, __ATOMIC_ACQUIRE);
	const uint64_t most = now_ns() + HOLD_WORD_NS_MOST;
	uint64_t last = 0;

	for (; slots; slots &= slots - 1) {
		const struct burst_page *page = (const void *)(pages + (size_t)__builtin_ctz(slots) * PAGE);
		const uint64_t until = __atomic_load_n(&page->until, __ATOMIC_ACQUIRE);

		if (until > last && until <= most)
			last = until;
	}
	return (last + HOLD_NS_A_US - 1) / HOLD_NS_A_US;
}

void burst_wait(CUdevice ordinal)
{
	struct follow *follow = &follows[ordinal];
	const struct burst_page *page;
	unsigned long slack = 0;
	uint64_t word, left;
	bool held = false;

	while ((left = held_for(follow, held, &page, &word))) {
		const struct timespec time = { (time_t)(left / 1000000000), (long)(left % 1000000000) };

		if (!held) {
			__atomic_add_fetch(&follow->waiting, 1, __ATOMIC_RELAXED);
			slack = moment_punctual();
		}
		held = true;
		if (syscall(SYS_futex, &page->until, FUTEX_WAIT, (uint32_t)word, &time, NULL, 0) &&
		    errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT)
			nanosleep(&time, NULL);
	}
	if (held)
		__atomic_sub_fetch(&follow->waiting, 1, __ATOMIC_RELAXED);
	moment_late_again(slack);
}

unsigned int burst_waiting(CUdevice ordinal)
{
	return __atomic_load_n(&follows[ordinal].waiting, __ATOMIC_RELAXED);
}

void burst_end(struct device *device)
{
	if (__atomic_load_n(&leads[device->ordinal].leads, __ATOMIC_RELAXED))
		burst_lead(device, -1, 0);
	for (unsigned int slot = 0; slot < BURST_LEADERS; slot++)
		if (__atomic_load_n(&follows[device->ordinal].slots, __ATOMIC_RELAXED) & 1U << slot)
			burst_follow(device, slot, -1);
}

/* The mapped pages belong to the parent, and tell what the parent does. */
static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	for (size_t i = 0; i < GG_ORDINALS; i++) {
		leads[i] = (struct lead){ 0 };
		follows[i] = (struct follow){ 0 };
	}
	burst_leading = 0;
	watching = false;
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
