// SPDX-License-Identifier: Apache-2.0
/* What was counted is kept here: pages come and go with the daemon, and what
 * one shows is a copy. */

#include "totals.h"

static struct {
	struct device *device;
	uint64_t submitted, finished, launches;
} totals[GG_ORDINALS];			/* under `lock`; by the program's number of the device */
static struct totals_page *page;	/* under `lock` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void show(size_t ordinal)
{
	struct device *device = totals[ordinal].device;
	int index = device ? __atomic_load_n(&device->index, __ATOMIC_ACQUIRE) : -1;

	if (!page || index < 0 || index >= GG_DEVICES)
		return;
	__atomic_store_n(&page->gpu[index].launches, totals[ordinal].launches, __ATOMIC_RELAXED);
	/* The daemon finds no more in the second than in the first, if it reads the second first. */
	__atomic_store_n(&page->gpu[index].submitted, totals[ordinal].submitted, __ATOMIC_RELAXED);
	__atomic_store_n(&page->gpu[index].finished, totals[ordinal].finished, __ATOMIC_RELEASE);
}

void totals_add(struct device *device, uint64_t submitted, uint64_t finished)
{
	size_t ordinal = (size_t)device->ordinal;

	pthread_mutex_lock(&lock);
	totals[ordinal].device = device;
	totals[ordinal].submitted += submitted;
	totals[ordinal].launches += submitted > 0;
	totals[ordinal].finished += finished;
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
	for (size_t i = 0; i < GG_ORDINALS; i++)
		totals[i].device = NULL, totals[i].submitted = totals[i].finished = totals[i].launches = 0;
}
