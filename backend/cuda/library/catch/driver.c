// SPDX-License-Identifier: Apache-2.0
/* Finds libcuda.so.1 and its entry points, and keeps the way from each of them to our wrapper. */

#include "driver.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

struct driver real;

struct row {
	const char *name;
	void *wrapper;		/* ours, under the same name; NULL: not caught */
	size_t offset;		/* of the pointer in struct driver */
	int since;
};

static const struct row rows[] = {
#define ENTRY(name, kind, parameters, arguments, since) \
	{ #name, (void *)name, offsetof(struct driver, name), since },
#define OURS(name) { #name, NULL, offsetof(struct driver, name), 0 },
#include "entries.def"
#undef ENTRY
};
#define ROWS (sizeof(rows) / sizeof(rows[0]))

static void *libcuda;
static bool opened; /* atomically; `real` and `slots` do not change afterwards */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

/* From pointers in libcuda to rows: open addressing, at most half full. */
#define SLOTS 1024
_Static_assert(ROWS * 2 < SLOTS, "the table of pointers is too small");
static const struct row *slots[SLOTS];

static void **pointer_of(const struct row *row)
{
	return (void **)((char *)&real + row->offset);
}

static size_t slot_of(const void *pointer)
{
	return ((uintptr_t)pointer >> 4) * UINT64_C(0x9e3779b97f4a7c15) >> 54;
}

/* Two names of one function (an alias in libcuda) lead to the first of them that is caught. */
static void remember(const struct row *row)
{
	size_t slot = slot_of(*pointer_of(row));

	while (slots[slot]) {
		if (*pointer_of(slots[slot]) == *pointer_of(row))
			return;
		slot = (slot + 1) % SLOTS;
	}
	slots[slot] = row;
}

static void resolve(void)
{
	for (size_t i = 0; i < ROWS; i++) {
		void *pointer = driver_dlsym(libcuda, rows[i].name);

		/* A library that is not the driver, but resolves to us: never our own wrappers. */
		if (pointer == rows[i].wrapper)
			pointer = NULL;
		*pointer_of(&rows[i]) = pointer;
		if (pointer && rows[i].wrapper)
			remember(&rows[i]);
	}
}

static bool open_with(int flags)
{
	bool found;

	if (__atomic_load_n(&opened, __ATOMIC_ACQUIRE))
		return libcuda != NULL;
	/* Before the lock: the constructors of libcuda run in dlopen, and may call
	 * dlsym, which is ours. */
	void *handle = dlopen("libcuda.so.1", flags);

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

/*
 * libc's own dlsym, which ours hides. dlvsym is left alone by us and finds it under the version of
 * this architecture; glibc 2.34 moved it from libdl to libc and kept the old version beside the new
 * one.
 */
EARLY void *driver_libc_dlsym(void)
{
	static void *found; /* atomically */
	void *pointer = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
	static const char *const versions[] = {
		"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.0",
	};

	for (size_t i = 0; !pointer && i < sizeof(versions) / sizeof(versions[0]); i++)
		pointer = dlvsym(RTLD_NEXT, "dlsym", versions[i]);
	__atomic_store_n(&found, pointer, __ATOMIC_RELEASE);
	return pointer;
}

void *driver_dlsym(void *handle, const char *name)
{
	void *(*function)(void *, const char *) =
		(void *(*)(void *, const char *))driver_libc_dlsym();

	return function ? function(handle, name) : NULL;
}

void *driver_wrapper(const void *pointer)
{
	if (!pointer || !__atomic_load_n(&opened, __ATOMIC_ACQUIRE))
		return NULL;
	for (size_t slot = slot_of(pointer); slots[slot]; slot = (slot + 1) % SLOTS)
		if (*pointer_of(slots[slot]) == pointer)
			return slots[slot]->wrapper;
	return NULL;
}

static const struct row *caught(const char *name)
{
	for (size_t i = 0; i < ROWS; i++)
		if (rows[i].wrapper && !strcmp(rows[i].name, name))
			return &rows[i];
	return NULL;
}

bool driver_catches(const char *name)
{
	return caught(name) != NULL;
}

void *driver_exported(const char *name)
{
	const struct row *row = caught(name);

	return row ? row->wrapper : NULL;
}

void *driver_wrapper_of(const char *name)
{
	const struct row *row = caught(name);

	return row && *pointer_of(row) ? row->wrapper : NULL;
}

/* "cuMemcpyHtoD_v2_ptds" is of "cuMemcpyHtoD", and a per-thread one. */
static bool of_family(const char *name, const char *base, bool *per_thread)
{
	size_t length = strlen(base);
	const char *rest = name + length;

	if (strncmp(name, base, length))
		return false;
	if (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '0' && rest[2] <= '9')
		rest += 3;
	*per_thread = !strcmp(rest, "_ptsz") || !strcmp(rest, "_ptds");
	return *per_thread || !*rest;
}

void *driver_wrapper_named(const char *base, int version, bool per_thread)
{
	const struct row *best = NULL;
	bool best_per_thread = false;

	for (size_t i = 0; i < ROWS; i++) {
		const struct row *row = &rows[i];
		bool is_per_thread;

		if (!row->wrapper || !*pointer_of(row) || row->since > version ||
		    !of_family(row->name, base, &is_per_thread) || (is_per_thread && !per_thread))
			continue;
		if (!best || is_per_thread > best_per_thread ||
		    (is_per_thread == best_per_thread && row->since > best->since)) {
			best = row;
			best_per_thread = is_per_thread;
		}
	}
	return best ? best->wrapper : NULL;
}
