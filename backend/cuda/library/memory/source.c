// SPDX-License-Identifier: Apache-2.0
#include "source.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "async.h"
#include "life.h"
#include "table.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct table sources;	/* sources by their pools; under the lock */

void source_give_back(CUmemoryPool pool, struct source *source)
{
	bool put = false;

	pthread_mutex_lock(&lock);
	if (source)
		put = table_put(&sources, (uintptr_t)pool, source);
	pthread_mutex_unlock(&lock);
	if (!put)
		free(source);
}

static bool can_be_ours(const CUmemPoolProps *props)
{
	return props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED && props->handleTypes == CU_MEM_HANDLE_TYPE_NONE &&
	       props->location.type == CU_MEM_LOCATION_TYPE_DEVICE && !props->maxSize && !props->usage;
}

void source_enter(CUmemoryPool pool, const CUmemPoolProps *props)
{
	struct source *source = malloc(sizeof(*source));

	if (source) {
		*source = (struct source){ .type = props->allocType, .location = props->location };
		source->usage = can_be_ours(props) ? async_usage_new(pool) : NULL;
		source->ours = source->usage;
	}
	source_give_back(pool, source);
}

struct source *source_take(CUmemoryPool pool)
{
	pthread_mutex_lock(&lock);
	struct source *source = pool ? table_take(&sources, (uintptr_t)pool) : NULL;
	pthread_mutex_unlock(&lock);
	return source;
}

bool source_find(CUmemoryPool pool, struct source *found)
{
	pthread_mutex_lock(&lock);
	const struct source *source = pool ? table_get(&sources, (uintptr_t)pool) : NULL;

	if (source)
		*found = *source;
	pthread_mutex_unlock(&lock);
	return source;
}

void source_leave(CUmemoryPool pool)
{
	pthread_mutex_lock(&lock);
	struct source *source = table_get(&sources, (uintptr_t)pool);

	if (source)
		source->ours = false;
	pthread_mutex_unlock(&lock);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	sources = (struct table){ 0 };
}

LIFE(.stage = LIFE_FOREIGN, .forget = forget);
