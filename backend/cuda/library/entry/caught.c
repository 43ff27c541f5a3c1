// SPDX-License-Identifier: Apache-2.0
/* The table of the wrappers, found by name, or by the function that libcuda, or NVML, has under that name. */

#include "caught.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "driver.h"
#include "monitor.h"
#include "nvml.h"

struct row {
	const char *name;
	void *wrapper;		/* the library's, under the same name */
	size_t offset;		/* of the driver's pointer in struct driver */
	int since;
};

static const struct row rows[] = {
#define ENTRY(name, kind, parameters, arguments, since) \
	{ #name, (void *)name, offsetof(struct driver, name), since },
#include "entries.def"
#undef ENTRY
};
#define ROWS (sizeof(rows) / sizeof(rows[0]))

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

/* For two names of one function (an alias in libcuda), keep the first that is caught. */
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

/* Once libcuda is open, `real` does not change any more. */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void remember_all(void)
{
	for (size_t i = 0; i < ROWS; i++)
		if (*pointer_of(&rows[i]))
			remember(&rows[i]);
}

void *caught_at(const void *pointer)
{
	if (!pointer)
		return NULL;
	if (!driver_loaded())
		return monitor_at(pointer);
	pthread_once(&once, remember_all);
	for (size_t slot = slot_of(pointer); slots[slot]; slot = (slot + 1) % SLOTS)
		if (*pointer_of(slots[slot]) == pointer)
			return slots[slot]->wrapper;
	return monitor_at(pointer);
}

void *caught_behind(const void *pointer)
{
	if (!pointer)
		return NULL;
	return driver_opened() ? caught_at(pointer) : nvml_opened() ? monitor_at(pointer) : NULL;
}

static const struct row *find(const char *name)
{
	for (size_t i = 0; i < ROWS; i++)
		if (rows[i].wrapper && !strcmp(rows[i].name, name))
			return &rows[i];
	return NULL;
}

bool caught_is(const char *name)
{
	return find(name) || monitor_exported(name);
}

static bool is_nvml(const char *name)
{
	return !strncmp(name, "nvml", 4);
}

bool caught_loaded(const char *name)
{
	return is_nvml(name) ? nvml_loaded() : driver_loaded();
}

void *caught_exported(const char *name)
{
	const struct row *row = find(name);

	return row ? row->wrapper : monitor_exported(name);
}

void *caught_wrapper(const char *name)
{
	const struct row *row = find(name);

	if (is_nvml(name))
		return monitor_wrapper(name);
	return row && *pointer_of(row) ? row->wrapper : NULL;
}

/* "cuMemcpyHtoD_v2_ptds" is of "cuMemcpyHtoD", and per-thread. */
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

void *caught_named(const char *base, int version, bool per_thread)
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
