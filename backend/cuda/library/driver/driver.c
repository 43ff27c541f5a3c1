// SPDX-License-Identifier: Apache-2.0
/* Finding libcuda.so.1 and its entry points. */

#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "elf.h"

struct driver real;

struct row {
	const char *name;
	size_t offset;		/* of the pointer in struct driver */
};

static const struct row rows[] = {
#define ENTRY(name, ...) { #name, offsetof(struct driver, name) },
#define OURS(name) { #name, offsetof(struct driver, name) },
#include "entries.def"
#undef ENTRY
};
#define ROWS (sizeof(rows) / sizeof(rows[0]))

/* The first and the last byte of the object that this is linked into, the library or a test; set by the linker. */
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

static void *libcuda;
static bool opened; /* atomically; `real` does not change afterwards */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

bool driver_is_ours(const void *pointer)
{
	return (const char *)pointer >= __ehdr_start && (const char *)pointer < _end;
}

static void resolve(void)
{
	for (size_t i = 0; i < ROWS; i++) {
		void *pointer = driver_dlsym(libcuda, rows[i].name);

		*(void **)((char *)&real + rows[i].offset) = driver_is_ours(pointer) ? NULL : pointer;
	}
}

static bool open_with(int flags)
{
	bool found;

	if (__atomic_load_n(&opened, __ATOMIC_ACQUIRE))
		return libcuda != NULL;
	/* Before the lock: the constructors of libcuda run in dlopen, and may call dlsym, which is wrapped here. */
	void *handle = driver_dlopen("libcuda.so.1", flags);

	pthread_mutex_lock(&open_lock);
	if (!opened && handle) {
		libcuda = handle;
		resolve();
		__atomic_store_n(&opened, true, __ATOMIC_RELEASE);
	}
	found = opened;
	pthread_mutex_unlock(&open_lock);
	return found;
}

void driver_forget(void)
{
	open_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

bool driver_open(void)
{
	return open_with(RTLD_NOW | RTLD_LOCAL);
}

bool driver_loaded(void)
{
	return open_with(RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
}

bool driver_opened(void)
{
	return __atomic_load_n(&opened, __ATOMIC_ACQUIRE) && libcuda;
}

/* Looked up in the tables of libc: dlvsym, which could find it, is wrapped, too. */
EARLY void *driver_libc(enum driver_libc which)
{
	static const char *const names[LIBC_HIDDEN] = { "dlsym", "dlvsym", "dlopen" };
	static void *found[LIBC_HIDDEN]; /* atomically */
	void *pointer = __atomic_load_n(&found[which], __ATOMIC_ACQUIRE);

	if (!pointer) {
		pointer = elf_libc(names[which]);
		__atomic_store_n(&found[which], pointer, __ATOMIC_RELEASE);
	}
	return pointer;
}

void *driver_dlsym(void *handle, const char *name)
{
	void *(*function)(void *, const char *) = (void *(*)(void *, const char *))driver_libc(LIBC_DLSYM);

	return function ? function(handle, name) : NULL;
}

void *driver_dlopen(const char *file, int flags)
{
	void *(*function)(const char *, int) = (void *(*)(const char *, int))driver_libc(LIBC_DLOPEN);

	return function ? function(file, flags) : NULL;
}
