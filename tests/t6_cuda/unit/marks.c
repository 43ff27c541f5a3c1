// SPDX-License-Identifier: Apache-2.0
#include "marks.h"

#include <dlfcn.h>
#include <unistd.h>

#include "chunk.h"
#include "driver.h"

/* The kernel of hash.cu, in C. */
const size_t ggroup_hash_parameters[] = { sizeof(CUdeviceptr), sizeof(uint64_t), sizeof(void *), sizeof(uint64_t),
					  sizeof(uint64_t), 0 };
void ggroup_hash(void **parameters);
static uint64_t made;	/* atomically; chunks marked */
static bool holds;	/* atomically; kernels do not end */

static uint64_t mixed(uint64_t x)
{
	x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
	x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
	return x ^ x >> 33;
}

void ggroup_hash(void **parameters)
{
	static unsigned int (*rows)(void);	/* launches of one stream run one at a time */
	const uint64_t *data = *(uint64_t **)parameters[0], *key[2] = { parameters[3], parameters[4] };
	const uint64_t vectors = *(uint64_t *)parameters[1], parts = vectors / 16384;
	struct mark *sums = *(struct mark **)parameters[2];

	while (__atomic_load_n(&holds, __ATOMIC_ACQUIRE))
		usleep(1000);
	if (!rows)
		rows = (unsigned int (*)(void))driver_dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD),
							    "fake_launch_rows");
	for (unsigned int row = 0; row < rows(); row++, data += 2 * vectors, sums += parts)
		for (uint64_t part = 0; part < parts; part++) {
			unsigned __int128 sum = 0;

			for (uint64_t i = part * 16384; i < (part + 1) * 16384; i++)
				sum += (unsigned __int128)(data[2 * i] + mixed(*key[0] + i * 0x9e3779b97f4a7c15)) *
				       (data[2 * i + 1] + mixed(*key[1] + i * 0xd1342543de82ef95));
			sums[part] = (struct mark){ (uint64_t)sum, (uint64_t)(sum >> 64) };
		}
	__atomic_add_fetch(&made, rows(), __ATOMIC_RELAXED);
}

uint64_t marks_made(void)
{
	return __atomic_load_n(&made, __ATOMIC_RELAXED);
}

void marks_hold(bool hold)
{
	__atomic_store_n(&holds, hold, __ATOMIC_RELEASE);
}
