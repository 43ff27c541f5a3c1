// SPDX-License-Identifier: Apache-2.0
#include "names.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "life.h"
#include "object.h"
#include "table.h"

/* The library's names: no address of a program begins like this. */
#define OURS UINT64_C(0x6767000000000000)
#define STEP 16

struct name {
	CUmemGenericAllocationHandle name, real;
	uint64_t held;	/* number of holds of the program */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct table by_name, by_real;
static uint64_t last;	/* under the lock of the tree, or atomically */

CUmemGenericAllocationHandle names_next(void)
{
	return OURS | __atomic_add_fetch(&last, STEP, __ATOMIC_RELAXED);
}

/* With the lock held. */
static struct name *add(CUmemGenericAllocationHandle real)
{
	struct name *name = calloc(1, sizeof(*name));

	if (!name)
		return NULL;
	*name = (struct name){ .name = names_next(), .real = real };
	if (table_put(&by_name, name->name, name)) {
		if (table_put(&by_real, real, name))
			return name;
		table_take(&by_name, name->name);
	}
	free(name);
	return NULL;
}

CUmemGenericAllocationHandle names_give(CUmemGenericAllocationHandle real, bool again)
{
	const bool taken = object_is(real);
	CUmemGenericAllocationHandle given = real;
	struct name *name;

	pthread_mutex_lock(&lock);
	name = table_get(&by_real, real);
	if (name && !name->held && !again) {	/* the memory of that name is gone */
		table_take(&by_name, name->name);
		table_take(&by_real, real);
		free(name);
		name = NULL;
	}
	if (!name && taken)
		name = add(real);
	if (name) {
		name->held++;
		given = name->name;
	} else if (taken) {
		given = 0;
	}
	pthread_mutex_unlock(&lock);
	return given;
}

CUmemGenericAllocationHandle names_real(CUmemGenericAllocationHandle of)
{
	pthread_mutex_lock(&lock);
	const struct name *name = table_get(&by_name, of);
	const CUmemGenericAllocationHandle real = name ? name->real : of;
	pthread_mutex_unlock(&lock);
	return real;
}

bool names_released(CUmemGenericAllocationHandle of)
{
	pthread_mutex_lock(&lock);
	struct name *name = table_get(&by_name, of);
	const bool held = name && name->held;

	/* While the memory is mapped, the program may get it again, by the same name. */
	if (held)
		name->held--;
	pthread_mutex_unlock(&lock);
	return held;
}

void names_kept(CUmemGenericAllocationHandle of)
{
	struct name *name;

	pthread_mutex_lock(&lock);
	name = table_get(&by_name, of);
	if (name)
		name->held++;
	pthread_mutex_unlock(&lock);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	by_name = by_real = (struct table){ 0 };
	last = 0;
}

LIFE(.stage = LIFE_FOREIGN, .forget = forget);
