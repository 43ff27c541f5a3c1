// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "life.h"

/* Places in the table, by the hash of a map's bytes, and maps per place. */
#define PLACES 1024
#define WAYS 4
#define WORDS (sizeof(CUtensorMap) / sizeof(uint64_t))

/*
 * The fields are read without a lock, so for a moment they may come from two maps; then unused memory counts as used
 * once.
 */
static struct place {
	struct {
		uint64_t hash;		/* atomically; 0: none */
		uint64_t address, bytes;	/* atomically */
	} map[WAYS];
	unsigned int oldest;		/* under `lock` */
} places[PLACES];

bool tensor_any;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Returns a hash with enough bits that no two maps of a program share a value. */
static uint64_t hash_of(const void *at)
{
	uint64_t word, hash = 0;

	for (size_t i = 0; i < WORDS; i++) {
		memcpy(&word, (const char *)at + i * sizeof(word), sizeof(word));
		hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
		hash ^= hash >> 32;
	}
	return hash + !hash;
}

static struct place *place_of(uint64_t hash)
{
	return &places[hash >> 20 & (PLACES - 1)];
}

void tensor_encoded(const CUtensorMap *map, CUdeviceptr address, size_t bytes)
{
	const uint64_t hash = hash_of(map);
	struct place *place = place_of(hash);
	unsigned int way = 0;

	pthread_mutex_lock(&lock);
	while (way < WAYS && __atomic_load_n(&place->map[way].hash, __ATOMIC_RELAXED) != hash)
		way++;
	if (way == WAYS) {
		way = place->oldest;
		place->oldest = (place->oldest + 1) % WAYS;
	}
	__atomic_store_n(&place->map[way].hash, 0, __ATOMIC_RELEASE);
	__atomic_store_n(&place->map[way].address, address, __ATOMIC_RELAXED);
	__atomic_store_n(&place->map[way].bytes, bytes, __ATOMIC_RELAXED);
	__atomic_store_n(&place->map[way].hash, hash, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	__atomic_store_n(&tensor_any, true, __ATOMIC_RELEASE);
}

bool tensor_find(const void *at, CUdeviceptr *address, size_t *bytes)
{
	uint64_t hash;
	struct place *place;

	if (!__atomic_load_n(&tensor_any, __ATOMIC_ACQUIRE))
		return false;
	hash = hash_of(at);
	place = place_of(hash);
	for (unsigned int way = 0; way < WAYS; way++) {
		if (__atomic_load_n(&place->map[way].hash, __ATOMIC_ACQUIRE) != hash)
			continue;
		*address = __atomic_load_n(&place->map[way].address, __ATOMIC_RELAXED);
		*bytes = __atomic_load_n(&place->map[way].bytes, __ATOMIC_RELAXED);
		return true;
	}
	return false;
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	memset(places, 0, sizeof(places));
	tensor_any = false;
}

LIFE(.stage = LIFE_MOVES, .forget = forget);
