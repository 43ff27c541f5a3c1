// SPDX-License-Identifier: Apache-2.0
#include "clean.h"

#include "host.h"
#include "kept.h"
#include "life.h"
#include "pick.h"
#include "tree.h"
#include "turn.h"
#include "view.h"

/* Times in a row that a chunk may change before it is no longer marked, and marks left out before it is tried again. */
#define CHANGES 2
#define AGAIN 16

static struct chunk *chunk_of(const struct pick *pick)
{
	return &pick->region->chunk[pick->index];
}

bool clean_may_keep(const struct pick *pick)
{
	struct pool *pool = pick->region->device->pool;
	struct chunk *chunk = chunk_of(pick);
	bool may;

	if (chunk->changes >= CHANGES && ++chunk->changes < CHANGES + AGAIN)
		return false;
	if (chunk->changes >= CHANGES)
		chunk->changes = CHANGES - 1;
	pthread_mutex_lock(&pool->lock);
	may = pool->granted && !pool->halted && kept_may(pool, 0);
	pthread_mutex_unlock(&pool->lock);
	return may;
}

bool clean_wants_mark(const struct pick *pick)
{
	struct pool *pool = pick->region->device->pool;
	const struct chunk *chunk = chunk_of(pick);

	if (!chunk->copy.memory && chunk->changes >= CHANGES)
		return false;
	pthread_mutex_lock(&pool->lock);
	const bool granted = pool->granted && !pool->halted;

	pthread_mutex_unlock(&pool->lock);
	return granted;
}

void clean_keep(const struct pick *pick, struct spare copy, struct mark mark)
{
	struct chunk *chunk = chunk_of(pick);

	pthread_mutex_lock(&tree_lock);
	chunk->copy = copy;
	chunk->mark = mark;
	pthread_mutex_unlock(&tree_lock);
	host_is_copy(pick->region->device, chunk_class(pick->region, pick->index), true);
}

/* With the lock of the tree. */
static bool take(struct chunk *chunk, struct spare *copy, struct mark *mark)
{
	if (!chunk->copy.memory)
		return false;
	*copy = chunk->copy;
	if (mark)
		*mark = chunk->mark;
	chunk->copy = (struct spare){ 0 };
	return true;
}

bool clean_take(const struct pick *pick, struct spare *copy, struct mark *mark)
{
	bool taken;

	pthread_mutex_lock(&tree_lock);
	taken = take(chunk_of(pick), copy, mark);
	pthread_mutex_unlock(&tree_lock);
	if (taken)
		host_is_copy(pick->region->device, chunk_class(pick->region, pick->index), false);
	return taken;
}

void clean_found(const struct pick *pick, bool equal)
{
	struct chunk *chunk = chunk_of(pick);

	if (equal)
		chunk->changes = 0;
	else if (chunk->changes < CHANGES)
		chunk->changes++;
}

struct unwritten {
	uint64_t gap, bytes;
};

static void add_unwritten(struct pick *pick, void *argument)
{
	const struct chunk *chunk = chunk_of(pick);
	struct unwritten *sum = argument;

	if (chunk->place == CHUNK_DEVICE && chunk->copy.memory && chunk->gap == sum->gap &&
	    chunk->now.low == chunk->mark.low && chunk->now.high == chunk->mark.high && !view_is_shared(pick->region))
		sum->bytes += chunk_bytes(pick->region, pick->index);
}

uint64_t clean_unwritten(struct device *device)
{
	struct unwritten sum = { .gap = turn_gap(device) };

	if (!sum.gap || !__atomic_load_n(&device->clean, __ATOMIC_RELAXED))
		return 0;
	pthread_mutex_lock(&tree_lock);
	pick_each(device->regions, add_unwritten, &sum);
	pthread_mutex_unlock(&tree_lock);
	return sum.bytes;
}

bool clean_steal(struct device *device, enum chunk_class class, struct spare *copy)
{
	struct region *first, *region;
	bool taken = false;

	if (!host_copies(device, class))
		return false;
	pthread_mutex_lock(&tree_lock);
	region = first = device->regions->ring;
	for (bool more = region; more && !taken; more = (region = region->next) != first)
		for (size_t i = 0; i < region->chunks && !taken; i++)
			taken = !region->chunk[i].busy && !region->freeing && chunk_class(region, i) == class &&
				take(&region->chunk[i], copy, NULL);
	pthread_mutex_unlock(&tree_lock);
	if (taken)
		host_is_copy(device, class, false);
	return taken;
}

/* Frees the smallest copy; false: there is none. */
static bool shed(struct device *device)
{
	struct spare copy;

	for (int class = CLASSES - 1; class >= 0; class--)
		if (clean_steal(device, (enum chunk_class)class, &copy)) {
			host_drop(device, (enum chunk_class)class, copy);
			return true;
		}
	return false;
}

void clean_drop_all(struct device *device)
{
	while (shed(device))
		;
}

void clean_forget(struct region *region, size_t index)
{
	struct spare copy;

	if (clean_take(&(struct pick){ region, index }, &copy, NULL))
		host_give(region->device, chunk_class(region, index), copy);
}

static CUresult set_up(struct device *device)
{
	device->pool->shed_copy = shed;
	return CUDA_SUCCESS;
}

LIFE(.stage = LIFE_KEEPER, .set_up = set_up);
