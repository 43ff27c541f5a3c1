// SPDX-License-Identifier: Apache-2.0
#include "nvml.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

#include "driver.h"

struct nvml nvml;

static const struct {
	const char *name;
	size_t offset;		/* of the pointer in struct nvml */
} rows[] = {
#define NVML(name, parameters, arguments) { #name, offsetof(struct nvml, name) },
#include "nvml.def"
#undef NVML
	{ "nvmlDeviceGetUUID", offsetof(struct nvml, nvmlDeviceGetUUID) },
};

static bool opened;	/* atomically; `nvml` does not change afterwards */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* It stays loaded from then on, whatever the program closes: what we answer with calls it. */
bool nvml_loaded(void)
{
	void *handle;

	if (__atomic_load_n(&opened, __ATOMIC_ACQUIRE))
		return true;
	handle = driver_dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
	if (!handle)
		return false;
	pthread_mutex_lock(&lock);
	for (size_t i = 0; !opened && i < sizeof(rows) / sizeof(rows[0]); i++) {
		void *pointer = driver_dlsym(handle, rows[i].name);

		*(void **)((char *)&nvml + rows[i].offset) = driver_is_ours(pointer) ? NULL : pointer;
	}
	__atomic_store_n(&opened, true, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return true;
}

bool nvml_opened(void)
{
	return __atomic_load_n(&opened, __ATOMIC_ACQUIRE);
}

void nvml_forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}
