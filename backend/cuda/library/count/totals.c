// SPDX-License-Identifier: Apache-2.0
/* The counts of a process are kept here: pages come and go with the daemon, and each one shows a copy. */

#include "totals.h"

#include <string.h>

#include "moment.h"

static struct total {
	struct device *device;
	uint64_t submitted, finished, launches, placed, unplaced;
	int64_t worked;		/* us with kernels pending; while some are, less the moment at which that began */
	uint64_t since;		/* that moment; us */
	struct totals_set set;
	enum totals_told told;
} totals[GG_ORDINALS];			/* under `lock`; indexed by the program's number of the device */
static struct totals_page *page;	/* under `lock` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_pending(const struct total *total)
{
	return total->submitted > total->finished;
}

/* Time and state in one word, so that a daemon that reads it at any moment knows the time up to then: twice `worked`,
 * plus 1 while kernels are pending; then the moment of the read is to be added. */
static uint64_t word(const struct total *total)
{
	return (uint64_t)total->worked << 1 | is_pending(total);
}

static void show(size_t ordinal)
{
	struct device *device = totals[ordinal].device;
	int index = device ? __atomic_load_n(&device->index, __ATOMIC_ACQUIRE) : -1;

	if (!page || index < 0 || index >= GG_DEVICES)
		return;
	__atomic_store_n(&page->gpu[index].launches, totals[ordinal].launches, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].placed, totals[ordinal].placed, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].unplaced, totals[ordinal].unplaced, __ATOMIC_RELAXED);
	/* If the daemon reads `finished` before `submitted`, it never finds more finished than submitted. */
	__atomic_store_n(&page->gpu[index].worked, word(&totals[ordinal]), __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].submitted, totals[ordinal].submitted, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].finished, totals[ordinal].finished, __ATOMIC_RELEASE);
}

/* The working set has lines of its own, since a launch does not change it. */
static void show_set(size_t ordinal)
{
	struct device *device = totals[ordinal].device;
	int index = device ? __atomic_load_n(&device->index, __ATOMIC_ACQUIRE) : -1;

	if (!page || index < 0 || index >= GG_DEVICES)
		return;
	__atomic_store_n(&page->set[index].used, totals[ordinal].set.used, __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].resident, totals[ordinal].set.resident, __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].unwritten, totals[ordinal].set.unwritten, __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].missed, totals[ordinal].set.missed, __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].over, totals[ordinal].set.over, __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].told, totals[ordinal].told, __ATOMIC_RELEASE);
}

/* Adds to the counts as of `at`; 0: now. With `lock` held. */
static void count(struct device *device, uint64_t submitted, uint64_t finished, uint64_t at)
{
	size_t ordinal = (size_t)device->ordinal;
	struct total *total = &totals[ordinal];
	bool was = is_pending(total);

	total->device = device;
	total->submitted += submitted;
	total->launches += submitted > 0;
	total->finished += finished;
	if (was != is_pending(total) && !at)
		at = moment_us();
	if (!was && is_pending(total)) {
		total->since = at;
		total->worked -= (int64_t)at;
	} else if (was && !is_pending(total)) {
		total->worked += (int64_t)(at > total->since ? at : total->since);
	}
	show(ordinal);
}

void totals_add(struct device *device, uint64_t submitted, uint64_t finished)
{
	pthread_mutex_lock(&lock);
	count(device, submitted, finished, 0);
	pthread_mutex_unlock(&lock);
}

void totals_finish(struct device *device, uint64_t finished, uint64_t at)
{
	pthread_mutex_lock(&lock);
	count(device, 0, finished, at);
	pthread_mutex_unlock(&lock);
}

void totals_placed(CUdevice ordinal, uint64_t placed, uint64_t unplaced)
{
	pthread_mutex_lock(&lock);
	totals[ordinal].placed += placed;
	totals[ordinal].unplaced += unplaced;
	show((size_t)ordinal);
	pthread_mutex_unlock(&lock);
}

void totals_tell(struct device *device, const struct totals_set *set, enum totals_told told)
{
	size_t ordinal = (size_t)device->ordinal;

	pthread_mutex_lock(&lock);
	totals[ordinal].device = device;
	totals[ordinal].set = *set;
	totals[ordinal].told = told;
	show_set(ordinal);
	pthread_mutex_unlock(&lock);
}

void totals_get(const struct device *device, uint64_t *submitted, uint64_t *finished)
{
	size_t ordinal = (size_t)device->ordinal;

	pthread_mutex_lock(&lock);
	*submitted = totals[ordinal].submitted;
	*finished = totals[ordinal].finished;
	pthread_mutex_unlock(&lock);
}

void totals_share(struct totals_page *shared)
{
	pthread_mutex_lock(&lock);
	page = shared;
	for (size_t i = 0; i < GG_ORDINALS; i++) {
		show(i);
		show_set(i);
	}
	pthread_mutex_unlock(&lock);
}

bool totals_stand(bool stands)
{
	bool told;

	pthread_mutex_lock(&lock);
	told = page != NULL;
	if (told)
		__atomic_store_n(&page->stands, stands, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&lock);
	return told;
}

void totals_forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	page = NULL;
	memset(totals, 0, sizeof(totals));
}
