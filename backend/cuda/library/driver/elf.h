/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What objects that are loaded export, and what they take from others, read from their tables: where dlsym(3) cannot be
 * asked, as it is ours.
 */
#ifndef GGROUP_CUDA_ELF_H
#define GGROUP_CUDA_ELF_H

#include <link.h>
#include <stdbool.h>
#include <stddef.h>

/* The address of a function that libc exports, or libdl before glibc 2.34, under whatever version; NULL: it has
 * none. */
void *elf_libc(const char *name);

/* A place of an object that the loader puts an address into, for what the object takes from others. */
struct elf_slot {
	const char *name;	/* of the symbol */
	void **place;
	bool bound;		/* not: the loader looks for it at the first call, and `place` points into the object */
};

/* Calls `visit` for each of an object. By dl_iterate_phdr(3), within which neither dlopen(3) nor dlsym(3) may be
 * called. */
void elf_slots(const struct dl_phdr_info *object, void (*visit)(const struct elf_slot *slot, void *argument),
	       void *argument);

/* Puts an address into one; false where its page cannot be written to. */
bool elf_set(const struct dl_phdr_info *object, void **place, void *address);

#endif
