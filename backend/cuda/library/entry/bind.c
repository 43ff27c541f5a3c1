// SPDX-License-Identifier: Apache-2.0
#include "bind.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "caught.h"
#include "driver.h"
#include "elf.h"
#include "hook.h"
#include "log.h"

/* The objects that there were before: those that have come since are looked at. */
struct known {
	ElfW(Addr) *bases;
	size_t count, room;
	const struct dl_phdr_info *object;	/* that is looked at */
	unsigned int changed;
};


static int remember(struct dl_phdr_info *object, size_t size, void *argument)
{
	struct known *known = argument;
	ElfW(Addr) *more;

	(void)size;
	if (known->count == known->room) {
		more = realloc(known->bases, (known->room + 256) * sizeof(*more));
		if (!more)
			return 1;	/* the others are looked at again, which changes nothing */
		known->bases = more;
		known->room += 256;
	}
	known->bases[known->count++] = object->dlpi_addr;
	return 0;
}

/* libcuda and NVML have their own entry points in them, which we call; and what is ours has ours. */
static bool is_left_alone(const struct dl_phdr_info *object)
{
	const char *name = strrchr(object->dlpi_name, '/');

	name = name ? name + 1 : object->dlpi_name;
	return !strncmp(name, "libcuda.so", 10) || !strncmp(name, "libnvidia-ml.so", 15) ||
	       !strncmp(name, "libggroup-cuda", 14);
}

static void look(const struct elf_slot *slot, void *argument)
{
	struct known *known = argument;
	void *now = __atomic_load_n(slot->place, __ATOMIC_ACQUIRE), *wrapper = hook_instead(slot->name);

	if (!wrapper || now == wrapper)
		return;
	/* Another library may have a function of that name, and be meant. */
	if (slot->bound && hook_behind(now) != wrapper)
		return;
	known->changed += elf_set(known->object, slot->place, wrapper);
}

static int put_right(struct dl_phdr_info *object, size_t size, void *argument)
{
	struct known *known = argument;

	(void)size;
	for (size_t i = 0; i < known->count; i++)
		if (known->bases[i] == object->dlpi_addr)
			return 0;
	if (is_left_alone(object))
		return 0;
	known->object = object;
	elf_slots(object, look, known);
	return 0;
}

void *bind_open(const char *file, int flags)
{
	struct known known = { 0 };
	void *handle;

	dl_iterate_phdr(remember, &known);
	handle = driver_dlopen(file, flags);
	if (handle) {
		/* What is caught is known by its address, which is asked of the loader: before the objects are held. */
		caught_loaded("cu");
		caught_loaded("nvml");
		dl_iterate_phdr(put_right, &known);
		if (known.changed)
			log_line("%s: %u ways to the driver led past the library", file ? file : "", known.changed);
	}
	free(known.bases);
	return handle;
}
