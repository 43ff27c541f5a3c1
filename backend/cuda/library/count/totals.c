// SPDX-License-Identifier: Apache-2.0
/* What was counted is kept here: pages come and go with the daemon, and what
 * one shows is a copy. */

#include "totals.h"

#include <string.h>

static struct {
	struct device *device;
	uint64_t submitted, finished;
	struct totals_set set;
	enum totals_told told;
} totals[GG_ORDINALS];			/* under `lock`; by the program's number of the device */
static struct totals_page *page;	/* under `lock` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void show(size_t ordinal)
{
	struct device *device = totals[ordinal].device;
	int index = device ? __atomic_load_n(&device->index, __ATOMIC_ACQUIRE) : -1;

	if (!page || index < 0 || index >= GG_DEVICES)
		return;
	/* The daemon finds no more in the second than in the first, if it reads the second first. */
	__atomic_store_n(&page->gpu[index].submitted, totals[ordinal].submitted, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].finished, totals[ordinal].finished, __ATOMIC_RELEASE);
	__atomic_store_n(&page->gpu[index].used, totals[ordinal].set.used, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].resident, totals[ordinal].set.resident, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].unwritten, totals[ordinal].set.unwritten, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].missed, totals[ordinal].set.missed, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].over, totals[ordinal].set.over, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].told, totals[ordinal].told, __ATOMIC_RELEASE);
}

void totals_add(struct device *device, uint64_t submitted, uint64_t finished)
{
	size_t ordinal = (size_t)device->ordinal;

	pthread_mutex_lock(&lock);
	totals[ordinal].device = device;
	totals[ordinal].submitted += submitted;
	totals[ordinal].finished += finished;
	show(ordinal);
	pthread_mutex_unlock(&lock);
}

void totals_tell(struct device *device, const struct totals_set *set, enum totals_told told)
{
	size_t ordinal = (size_t)device->ordinal;

	pthread_mutex_lock(&lock);
	totals[ordinal].device = device;
	totals[ordinal].set = *set;
	totals[ordinal].told = told;
	show(ordinal);
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
	for (size_t i = 0; i < GG_ORDINALS; i++)
		show(i);
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
