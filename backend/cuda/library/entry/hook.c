// SPDX-License-Identifier: Apache-2.0
/*
 * The ways in which a program finds an entry point of the driver, or of NVML, each of which leads to the
 * wrapper:
 *
 * - linking: the library comes first in the search order, by LD_PRELOAD;
 * - dlsym: the library's own. It asks libc's, and returns the wrapper for the function at the resulting pointer; so
 *   handles of other libraries with functions of these names keep their meaning. For names without a wrapper it jumps
 *   to libc's dlsym, since RTLD_NEXT and RTLD_DEFAULT depend on the caller's address;
 * - dlvsym: likewise, where libc finds anything by it: libcuda and NVML have no versions;
 * - libc's own dlsym, dlvsym and dlopen, by a handle of libc: the library's;
 * - what is loaded with RTLD_DEEPBIND, which finds libc and libcuda before the library: bind.c;
 * - cuGetProcAddress, which cudart uses for everything: likewise, by the pointer that the driver returns, so that
 *   versions and the flags for the per-thread default stream are the driver's business;
 * - cuGetExportTable: likewise, for a table that has a function that dlsym finds.
 */

#include "hook.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bind.h"
#include "caught.h"
#include "driver.h"
#include "ours.h"
#include "wrapper.h"

/* Returned in two registers, on x86-64 and arm64. */
struct found {
	void *symbol;		/* the answer, if `elsewhere` is NULL */
	void *elsewhere;	/* libc's own function, to jump to, so that it sees the caller */
};

/* Called only by the few instructions below. */
#define BY_STUB __attribute__((visibility("hidden"), used))
BY_STUB struct found hook_find(void *handle, const char *name);
BY_STUB struct found hook_find_version(void *handle, const char *name, const char *version);
BY_STUB struct found hook_open(const char *file, int flags, const void *caller);

/* A function of the library that first asks `decide`, with the program's arguments, and `third` in the third
 * register. */
#if defined(__x86_64__)
#define STUB(name, decide, third)			\
	__asm__(".text\n"				\
		".globl " #name "\n"			\
		".type " #name ", @function\n"		\
		#name ":\n"				\
		"	.cfi_startproc\n"		\
		"	push %rdi\n"			\
		"	.cfi_adjust_cfa_offset 8\n"	\
		"	push %rsi\n"			\
		"	.cfi_adjust_cfa_offset 8\n"	\
		"	push %rdx\n"			\
		"	.cfi_adjust_cfa_offset 8\n"	\
		third					\
		"	call " #decide "\n"		\
		"	mov %rdx, %r11\n"		\
		"	pop %rdx\n"			\
		"	.cfi_adjust_cfa_offset -8\n"	\
		"	pop %rsi\n"			\
		"	.cfi_adjust_cfa_offset -8\n"	\
		"	pop %rdi\n"			\
		"	.cfi_adjust_cfa_offset -8\n"	\
		"	test %r11, %r11\n"		\
		"	jnz 1f\n"			\
		"	ret\n"				\
		"1:	jmp *%r11\n"			\
		"	.cfi_endproc\n"		\
		".size " #name ", . - " #name "\n")
#define CALLER "	mov 24(%rsp), %rdx\n"
#elif defined(__aarch64__)
#define STUB(name, decide, third)			\
	__asm__(".text\n"				\
		".globl " #name "\n"			\
		".type " #name ", %function\n"		\
		#name ":\n"				\
		"	.cfi_startproc\n"		\
		"	stp x29, x30, [sp, #-48]!\n"	\
		"	.cfi_def_cfa_offset 48\n"	\
		"	.cfi_offset 29, -48\n"		\
		"	.cfi_offset 30, -40\n"		\
		"	stp x0, x1, [sp, #16]\n"	\
		"	str x2, [sp, #32]\n"		\
		third					\
		"	bl " #decide "\n"		\
		"	mov x9, x0\n"			\
		"	mov x10, x1\n"			\
		"	ldp x0, x1, [sp, #16]\n"	\
		"	ldr x2, [sp, #32]\n"		\
		"	ldp x29, x30, [sp], #48\n"	\
		"	.cfi_def_cfa_offset 0\n"	\
		"	.cfi_restore 29\n"		\
		"	.cfi_restore 30\n"		\
		"	cbnz x10, 1f\n"		\
		"	mov x0, x9\n"			\
		"	ret\n"				\
		"1:	br x10\n"			\
		"	.cfi_endproc\n"		\
		".size " #name ", . - " #name "\n")
#define CALLER "	mov x2, x30\n"
#else
#error "dlsym needs its few instructions for this machine"
#endif

STUB(dlsym, hook_find, "");
STUB(dlvsym, hook_find_version, "");
STUB(dlopen, hook_open, CALLER);

/* The functions of libc that the library's hide, with the library's: a program may ask for them by name. */
static const struct hidden {
	const char *name;
	enum driver_libc which;
	void *ours;
} hidden[] = {
	{ "dlsym", LIBC_DLSYM, (void *)dlsym },
	{ "dlvsym", LIBC_DLVSYM, (void *)dlvsym },
	{ "dlopen", LIBC_DLOPEN, (void *)dlopen },
};
#define HIDDEN (sizeof(hidden) / sizeof(hidden[0]))

static const struct hidden *hidden_named(const char *name)
{
	for (size_t i = 0; i < HIDDEN; i++)
		if (!strcmp(hidden[i].name, name))
			return &hidden[i];
	return NULL;
}

void *hook_instead(const char *name)
{
	const struct hidden *one = hidden_named(name);

	return one ? one->ours : caught_is(name) ? caught_exported(name) : NULL;
}

void *hook_behind(const void *pointer)
{
	for (size_t i = 0; i < HIDDEN; i++)
		if (pointer && driver_libc(hidden[i].which) == pointer)
			return hidden[i].ours;
	return caught_behind(pointer);
}

/*
 * Look up by the two special handles. libc would find the library's wrapper under RTLD_DEFAULT whether libcuda is there
 * or not; the program is told that the symbol is missing until it has loaded libcuda. A definition that comes before
 * the library's, such as the program's own, is returned as it is.
 */
static void *in_scope(void *handle, const char *name)
{
	void *first = handle == RTLD_DEFAULT ? driver_dlsym(RTLD_DEFAULT, name) : NULL;
	void *wrapper = caught_loaded(name) ? caught_wrapper(name) : NULL;

	if (first && first != caught_exported(name))
		return caught_at(first) ? caught_at(first) : first;
	/* Sets dlerror() where there is nothing: no other object in the scope has what the library exports. */
	return wrapper ? wrapper : driver_dlsym(RTLD_NEXT, name);
}

static void *by_handle(void *handle, const char *name)
{
	void *symbol = driver_dlsym(handle, name);
	void *wrapper;

	/* The library's own symbol (by the handle of the program, or of the library): the same question as with
	 * RTLD_DEFAULT. */
	if (symbol && symbol == caught_exported(name))
		return in_scope(RTLD_NEXT, name);
	if (!symbol || !caught_loaded(name))
		return symbol;
	wrapper = caught_at(symbol);
	return wrapper ? wrapper : symbol;
}

/* Look up in libc itself: what it finds where the library has nothing of the name, or its own function where the
 * program asks for that by a handle. */
static void *of_libc(void *handle, const char *name, const char *version)
{
	void *(*by_version)(void *, const char *, const char *) =
		(void *(*)(void *, const char *, const char *))driver_libc(LIBC_DLVSYM);

	if (!version)
		return driver_dlsym(handle, name);
	return by_version ? by_version(handle, name, version) : NULL;
}

static __attribute__((noinline)) struct found find(void *handle, const char *name, const char *version)
{
	struct found found = { NULL, NULL };
	const struct hidden *own = hidden_named(name);
	const bool special = handle == RTLD_DEFAULT || handle == RTLD_NEXT;

	/* A constructor of libcuda looks something up, before the library is ready. */
	if (ours_inside() || (!own && !caught_is(name))) {
		found.elsewhere = driver_libc(version ? LIBC_DLVSYM : LIBC_DLSYM);
		return found;
	}
	ours_enter();
	if (own) {
		found.symbol = of_libc(handle, name, version);
		if (found.symbol && found.symbol == driver_libc(own->which))
			found.symbol = own->ours;
	} else if (version && !special && !of_libc(handle, name, version)) {
		found.symbol = NULL;	/* dlerror() says why */
	} else {
		found.symbol = special ? in_scope(handle, name) : by_handle(handle, name);
	}
	ours_leave();
	return found;
}

/* Return whether a name may be one of the library's. The runtime of a sanitizer calls dlsym before it is ready for
 * instrumented code, with RTLD_NEXT. */
EARLY static bool may_be_ours(const void *handle, const char *name)
{
	return name && ((name[0] == 'c' && name[1] == 'u') ||
			(name[0] == 'n' && name[1] == 'v' && name[2] == 'm' && name[3] == 'l') ||
			(name[0] == 'd' && name[1] == 'l' && handle != RTLD_NEXT && handle != RTLD_DEFAULT));
}

EARLY struct found hook_find(void *handle, const char *name)
{
	struct found found = { NULL, NULL };

	if (may_be_ours(handle, name))
		return find(handle, name, NULL);
	found.elsewhere = driver_libc(LIBC_DLSYM);
	return found;
}

EARLY struct found hook_find_version(void *handle, const char *name, const char *version)
{
	struct found found = { NULL, NULL };

	if (may_be_ours(handle, name) && version)
		return find(handle, name, version);
	found.elsewhere = driver_libc(LIBC_DLVSYM);
	return found;
}

/* Return whether libc finds the same for a caller as for the library: a name without a directory is looked for in the
 * directories that the caller's object names (DT_RPATH, DT_RUNPATH). */
static bool is_for_anybody(const char *file, const void *caller)
{
	const struct link_map *object = NULL;
	Dl_info info;

	if (!file || strchr(file, '/'))
		return file && !strchr(file, '$');
	if (!dladdr1(caller, &info, (void **)&object, RTLD_DL_LINKMAP) || !object)
		return false;
	for (const ElfW(Dyn) *entry = object->l_ld; entry->d_tag != DT_NULL; entry++)
		if (entry->d_tag == DT_RPATH || entry->d_tag == DT_RUNPATH)
			return false;
	return true;
}

static __attribute__((noinline)) void *open_deep(const char *file, int flags)
{
	void *handle;

	ours_enter();
	handle = bind_open(file, flags);
	ours_leave();
	return handle;
}

EARLY struct found hook_open(const char *file, int flags, const void *caller)
{
	struct found found = { NULL, driver_libc(LIBC_DLOPEN) };

	if (flags & RTLD_DEEPBIND && !ours_inside() && is_for_anybody(file, caller)) {
		found.symbol = open_deep(file, flags);
		found.elsewhere = NULL;
	}
	return found;
}

/* Size in bytes above which a table of entry points (cuGetExportTable) is given as it is. Nothing documents these
 * tables; the first word of most of them is their size in bytes. A table with a function that is caught is given as a
 * copy, with the wrapper in its place. */
#define TABLE_MOST 4096

struct exported {
	struct exported *next;
	const void *from;
	size_t words[];
};

static struct exported *tables;
static pthread_mutex_t tables_lock = PTHREAD_MUTEX_INITIALIZER;

static const void *copied(const size_t *table, size_t count)
{
	struct exported *copy;

	pthread_mutex_lock(&tables_lock);
	for (copy = tables; copy && copy->from != table; copy = copy->next)
		;
	if (!copy) {
		copy = malloc(sizeof(*copy) + count * sizeof(*table));
		if (copy) {
			*copy = (struct exported){ tables, table };
			for (size_t i = 0; i < count; i++) {
				const void *wrapper = i ? caught_at((const void *)table[i]) : NULL;

				copy->words[i] = wrapper ? (size_t)wrapper : table[i];
			}
			tables = copy;
		}
	}
	pthread_mutex_unlock(&tables_lock);
	return copy ? copy->words : NULL;
}

static void replace_table(const void **table)
{
	const size_t *words = table ? *table : NULL;
	const size_t bytes = words ? words[0] : 0;
	const void *copy;

	if (bytes % sizeof(*words) || bytes < 2 * sizeof(*words) || bytes > TABLE_MOST)
		return;
	for (size_t i = 1; i < bytes / sizeof(*words); i++) {
		if (!caught_at((const void *)words[i]))
			continue;
		copy = copied(words, bytes / sizeof(*words));
		if (copy)
			*table = copy;
		return;
	}
}

FORWARD_THEN(cuGetExportTable, (const void **ppExportTable, const CUuuid *pExportTableId),
	     (ppExportTable, pExportTableId), replace_table(ppExportTable))

void hook_forget(void)
{
	tables_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* Replace the driver's pointer by the wrapper's. */
static void replace(const char *symbol, void **pointer, int version, cuuint64_t flags)
{
	const bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
	void *wrapper;

	if (!symbol || !pointer || !*pointer)
		return;
	wrapper = caught_at(*pointer);
	/* The pointer differs from dlsym's for every entry point that is caught. Either the entry point is not caught,
	 * or the driver keeps another way in for this purpose. Then the names and versions of cudaTypedefs.h decide. */
	if (!wrapper)
		wrapper = caught_named(symbol, version, per_thread);
	if (wrapper)
		*pointer = wrapper;
}

FORWARD_THEN(cuGetProcAddress, (const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags),
	     (symbol, pfn, cudaVersion, flags), replace(symbol, pfn, cudaVersion, flags))
FORWARD_THEN(cuGetProcAddress_v2,
	     (const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
	      CUdriverProcAddressQueryResult *symbolStatus),
	     (symbol, pfn, cudaVersion, flags, symbolStatus),
	     replace(symbol, pfn, cudaVersion, flags))

/* The function that cuInit calls in the library that CUDA_INJECTION64_PATH names. Naming this library there as well
 * does no harm; alone it catches nothing, as the program's symbols are bound by then (README.md). */
__attribute__((visibility("default"))) int InitializeInjection(void)
{
	return 1;
}
