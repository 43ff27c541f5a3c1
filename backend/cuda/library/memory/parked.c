// SPDX-License-Identifier: Apache-2.0
/*
 * Memory that streams have freed: finds what can be freed for good, and keeps what cannot be waited for until no stream
 * is being captured.
 */

#include "parked.h"
#include "life.h"

#include <stdlib.h>

#include "driver.h"
#include "gate.h"
#include "quiet.h"
#include "region.h"

pthread_mutex_t parked_lock = PTHREAD_MUTEX_INITIALIZER;
struct table parked_blocks;
static struct block *parked;	/* under the lock */
static size_t count;		/* atomically; written under the lock */

size_t parked_count(void)
{
	return __atomic_load_n(&count, __ATOMIC_RELAXED);
}

void block_is(struct block *block, enum block_state state)
{
	struct usage *usage = block->usage;

	if (!usage)
		return;
	usage->used -= block->state == BLOCK_USED ? block->bytes : 0;
	usage->parked -= block->state == BLOCK_PARKED ? block->bytes : 0;
	usage->used += state == BLOCK_USED ? block->bytes : 0;
	usage->parked += state == BLOCK_PARKED ? block->bytes : 0;
	block->state = state;
	if (usage->used > usage->used_high)
		usage->used_high = usage->used;
	if (usage->used + usage->parked > usage->reserved_high)
		usage->reserved_high = usage->used + usage->parked;
}

void block_of(struct block *block, struct usage *usage)
{
	struct usage *before = block->usage;

	block_is(block, BLOCK_NEW);
	block->usage = usage;
	if (usage)
		usage->blocks++;
	if (before && !--before->blocks && before->gone)
		free(before);
}

struct block *parked_take(bool (*wanted)(const struct block *, const void *), const void *argument)
{
	for (struct block **at = &parked; *at; at = &(*at)->next) {
		struct block *block = *at;

		if (!wanted(block, argument))
			continue;
		*at = block->next;
		block->next = NULL;
		__atomic_sub_fetch(&count, 1, __ATOMIC_RELAXED);
		return block;
	}
	return NULL;
}

void parked_put(struct block *block)
{
	struct block **at = &parked;

	while (*at)
		at = &(*at)->next;
	block->next = NULL;
	block->parked = true;
	*at = block;
	__atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
}

/* Free the memory of a block that is in no list; the block stays where that fails. */
static void finish(struct block *block)
{
	if (block->event)
		real.cuEventDestroy_v2(block->event);
	block->event = NULL;
	pthread_mutex_lock(&parked_lock);
	table_take(&parked_blocks, block->address);
	pthread_mutex_unlock(&parked_lock);
	const bool freed = region_free(block->address) == CUDA_SUCCESS;

	pthread_mutex_lock(&parked_lock);
	if (freed) {
		block_of(block, NULL);
		pthread_mutex_unlock(&parked_lock);
		free(block);
		return;
	}
	block->later = true;
	table_put(&parked_blocks, block->address, block);
	parked_put(block);
	pthread_mutex_unlock(&parked_lock);
}

static bool is_due(const struct block *block, const void *argument)
{
	(void)argument;
	if (block->later)
		return false;
	return quiet_passed(block->event);
}

static bool is_later(const struct block *block, const void *argument)
{
	(void)argument;
	return block->later;
}

static bool is_any(const struct block *block, const void *argument)
{
	(void)block;
	(void)argument;
	return true;
}

static struct block *next(bool (*wanted)(const struct block *, const void *))
{
	struct block *block;

	pthread_mutex_lock(&parked_lock);
	block = parked ? parked_take(wanted, NULL) : NULL;
	pthread_mutex_unlock(&parked_lock);
	return block;
}

static void put_back(struct block *block)
{
	pthread_mutex_lock(&parked_lock);
	parked_put(block);
	pthread_mutex_unlock(&parked_lock);
}

void parked_sweep(bool wait)
{
	CUstreamCaptureMode mode;
	struct block *block;
	size_t rounds;

	if (!parked_count())
		return;
	mode = driver_enter();
	while ((block = next(is_due)))
		finish(block);
	for (rounds = PARKED_MOST; rounds && !gate_capturing() && (block = next(is_later));
	     rounds--) {
		if (region_drain(block->device, block->address) == CUDA_SUCCESS) {
			finish(block);
			continue;
		}
		put_back(block);
		break;
	}
	for (rounds = parked_count(); wait && rounds && (block = next(is_any)); rounds--) {
		if (block->event) {
			quiet_await(block->event);
			finish(block);
			continue;
		}
		put_back(block);
	}
	driver_leave(mode);
}

static void forget(void)
{
	parked_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	parked_blocks = (struct table){ 0 };
	parked = NULL;
	count = 0;
}

LIFE(.stage = LIFE_STREAMED, .forget = forget);
