// SPDX-License-Identifier: Apache-2.0
/* Calls of a process while it is checkpointed (cuCheckpointProcessCheckpoint), as measured (docs/nvidia.md). */

#include "fake.h"

#include <string.h>

#include "internal.h"

/* Calls that return once the process was restored and is unlocked. */
static const char *const wait[] = {
	"cuMemCreate", "cuMemAlloc_v2", "cuLaunchKernel", "cuMemcpyDtoH_v2",
};
static const char *const fail[] = { "cuMemImportFromShareableHandle", "cuMemGetInfo_v2" };
/* Calls that work as always. All others end the process: those that ask for work by SIGSEGV; the rest is unknown. */
static const char *const as_always[] = {
	"cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDeviceGetUuid_v2", "cuDeviceGetUuid",
};

static bool checkpointed;	/* under fake_lock; read atomically */

static bool is_one_of(const char *name, const char *const *names, size_t count)
{
	for (size_t i = 0; i < count; i++)
		if (!strcmp(name, names[i]))
			return true;
	return false;
}
#define IS_ONE_OF(name, names) is_one_of(name, names, sizeof(names) / sizeof((names)[0]))

__attribute__((visibility("default"))) void fake_checkpoint(bool value)
{
	pthread_mutex_lock(&fake_lock);
	__atomic_store_n(&checkpointed, value, __ATOMIC_SEQ_CST);
	pthread_cond_broadcast(&fake_changed);
	pthread_mutex_unlock(&fake_lock);
}

CUresult fake_while_checkpointed(const char *name)
{
	if (!__atomic_load_n(&checkpointed, __ATOMIC_SEQ_CST) || IS_ONE_OF(name, as_always))
		return CUDA_SUCCESS;
	if (IS_ONE_OF(name, fail))
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (!IS_ONE_OF(name, wait))
		fake_die("%s: the process is checkpointed", name);
	pthread_mutex_lock(&fake_lock);
	while (checkpointed)
		pthread_cond_wait(&fake_changed, &fake_lock);
	pthread_mutex_unlock(&fake_lock);
	return CUDA_SUCCESS;
}
