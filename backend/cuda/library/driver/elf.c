// SPDX-License-Identifier: Apache-2.0
#include "elf.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

#if defined(__x86_64__)
#define RELOCATION_SLOT R_X86_64_JUMP_SLOT
#define RELOCATION_DATA R_X86_64_GLOB_DAT
#define RELOCATION_ADDRESS R_X86_64_64
#elif defined(__aarch64__)
#define RELOCATION_SLOT R_AARCH64_JUMP_SLOT
#define RELOCATION_DATA R_AARCH64_GLOB_DAT
#define RELOCATION_ADDRESS R_AARCH64_ABS64
#else
#error "the relocations of this machine are not known here"
#endif

/* What the dynamic section of an object says (elf(5)). */
struct tables {
	const ElfW(Sym) *symbols;
	const char *strings;
	const uint32_t *gnu_hash;
	const uint32_t *hash;
	const ElfW(Rela) *plt, *data;	/* of functions, and of everything else */
	size_t plt_bytes, data_bytes;
};

/* The loader has made addresses of what the file has, but for objects whose section it cannot write to. */
EARLY static const void *at(ElfW(Addr) base, ElfW(Addr) value)
{
	return (const void *)(value < base ? base + value : value);
}

EARLY static struct tables tables_of(ElfW(Addr) base, const ElfW(Dyn) *entry)
{
	struct tables found = { 0 };

	for (; entry && entry->d_tag != DT_NULL; entry++) {
		const void *place = at(base, entry->d_un.d_ptr);

		switch (entry->d_tag) {
		case DT_SYMTAB: found.symbols = place; break;
		case DT_STRTAB: found.strings = place; break;
		case DT_GNU_HASH: found.gnu_hash = place; break;
		case DT_HASH: found.hash = place; break;
		case DT_JMPREL: found.plt = place; break;
		case DT_PLTRELSZ: found.plt_bytes = entry->d_un.d_val; break;
		case DT_RELA: found.data = place; break;
		case DT_RELASZ: found.data_bytes = entry->d_un.d_val; break;
		}
	}
	return found;
}

/* Not strcmp(3) and strstr(3): a sanitizer has its own, which are not ready yet. */
EARLY static bool same(const char *one, const char *other)
{
	while (*one && *one == *other) {
		one++;
		other++;
	}
	return *one == *other;
}

EARLY static bool begins(const char *text, const char *with)
{
	while (*with && *text == *with) {
		text++;
		with++;
	}
	return !*with;
}

/* How many symbols there are: of the hash table of GNU the last one of the last chain. */
EARLY static size_t symbols_of(const struct tables *tables)
{
	const uint32_t *table = tables->gnu_hash, *buckets, *chains;
	uint32_t last = 0;

	if (tables->hash)
		return tables->hash[1];
	if (!table)
		return 0;
	buckets = table + 4 + table[2] * (sizeof(ElfW(Addr)) / sizeof(*table));
	chains = buckets + table[0];
	for (uint32_t i = 0; i < table[0]; i++)
		if (buckets[i] > last)
			last = buckets[i];
	if (last < table[1])
		return table[1];
	while (!(chains[last - table[1]] & 1))
		last++;
	return (size_t)last + 1;
}

EARLY static void *exported(const struct link_map *object, const char *name)
{
	const struct tables tables = tables_of(object->l_addr, object->l_ld);
	const size_t count = symbols_of(&tables);

	if (!tables.symbols || !tables.strings)
		return NULL;
	for (size_t i = 1; i < count; i++) {
		const ElfW(Sym) *symbol = &tables.symbols[i];

		if (symbol->st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbol->st_info) == STT_FUNC &&
		    same(tables.strings + symbol->st_name, name))
			return (void *)(object->l_addr + symbol->st_value);
	}
	return NULL;
}

/* The name of an object without its directory: libc.so.6, libdl.so.2, or as old ones have it libc-2.17.so. */
EARLY static bool is_libc(const struct link_map *object)
{
	const char *name = object->l_name, *at = name;

	for (; at && *at; at++)
		if (*at == '/')
			name = at + 1;
	return name && (begins(name, "libc.so.") || begins(name, "libc-2.") || begins(name, "libdl.so.") ||
			begins(name, "libdl-2."));
}

EARLY void *elf_libc(const char *name)
{
	for (const struct link_map *object = _r_debug.r_map; object; object = object->l_next) {
		void *found = is_libc(object) ? exported(object, name) : NULL;

		if (found)
			return found;
	}
	return NULL;
}

static const ElfW(Dyn) *dynamic_of(const struct dl_phdr_info *object)
{
	for (int i = 0; i < object->dlpi_phnum; i++)
		if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
			return (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
	return NULL;
}

static bool is_in(const struct dl_phdr_info *object, const void *pointer)
{
	const ElfW(Addr) place = (ElfW(Addr))pointer - object->dlpi_addr;

	for (int i = 0; i < object->dlpi_phnum; i++) {
		const ElfW(Phdr) *part = &object->dlpi_phdr[i];

		if (part->p_type == PT_LOAD && place >= part->p_vaddr && place - part->p_vaddr < part->p_memsz)
			return true;
	}
	return false;
}

static void visit_all(const struct dl_phdr_info *object, const struct tables *tables, const ElfW(Rela) *first,
		      size_t bytes, void (*visit)(const struct elf_slot *, void *), void *argument)
{
	for (size_t i = 0; first && i < bytes / sizeof(*first); i++) {
		const unsigned long type = ELF64_R_TYPE(first[i].r_info);
		const ElfW(Sym) *symbol = &tables->symbols[ELF64_R_SYM(first[i].r_info)];
		struct elf_slot slot;

		/* What it has itself is its own, whatever has the name elsewhere. */
		if ((type != RELOCATION_SLOT && type != RELOCATION_DATA &&
		     (type != RELOCATION_ADDRESS || first[i].r_addend)) || symbol->st_shndx != SHN_UNDEF)
			continue;
		slot.name = tables->strings + symbol->st_name;
		slot.place = (void **)(object->dlpi_addr + first[i].r_offset);
		slot.bound = !is_in(object, __atomic_load_n(slot.place, __ATOMIC_ACQUIRE));
		visit(&slot, argument);
	}
}

void elf_slots(const struct dl_phdr_info *object, void (*visit)(const struct elf_slot *slot, void *argument),
	       void *argument)
{
	const struct tables tables = tables_of(object->dlpi_addr, dynamic_of(object));

	if (!tables.symbols || !tables.strings)
		return;
	visit_all(object, &tables, tables.plt, tables.plt_bytes, visit, argument);
	visit_all(object, &tables, tables.data, tables.data_bytes, visit, argument);
}

/* Whether the loader has taken the right to write there away (PT_GNU_RELRO). */
static bool is_sealed(const struct dl_phdr_info *object, const void *place)
{
	for (int i = 0; i < object->dlpi_phnum; i++) {
		const ElfW(Phdr) *part = &object->dlpi_phdr[i];

		if (part->p_type == PT_GNU_RELRO)
			return (ElfW(Addr))place - object->dlpi_addr - part->p_vaddr < part->p_memsz;
	}
	return false;
}

bool elf_set(const struct dl_phdr_info *object, void **place, void *address)
{
	const long size = sysconf(_SC_PAGESIZE);
	void *page = (void *)((ElfW(Addr))place & ~((ElfW(Addr))size - 1));
	const bool sealed = is_sealed(object, place);

	if (sealed && mprotect(page, (size_t)size, PROT_READ | PROT_WRITE))
		return false;
	__atomic_store_n(place, address, __ATOMIC_RELEASE);
	if (sealed)
		mprotect(page, (size_t)size, PROT_READ);
	return true;
}
