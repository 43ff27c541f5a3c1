// SPDX-License-Identifier: Apache-2.0
/*
 * The ways in which a program finds an entry point of the driver, each of which leads to the wrapper:
 *
 * - linking: the library comes first in the search order, by LD_PRELOAD;
 * - dlsym: the library's own. It asks libc's, and returns the wrapper for the function at the resulting pointer; so
 *   handles of other libraries with functions of these names keep their meaning. For names without a wrapper it jumps
 *   to libc's dlsym, since RTLD_NEXT and RTLD_DEFAULT depend on the caller's address. dlvsym is left alone: libcuda has
 *   no versions;
 * - cuGetProcAddress, which cudart uses for everything: likewise, by the pointer that the driver returns, so that
 *   versions and the flags for the per-thread default stream are the driver's business.
 */

#include <dlfcn.h>
#include <string.h>

#include "caught.h"
#include "driver.h"
#include "ours.h"
#include "wrapper.h"

/* Returned in two registers, on x86-64 and arm64. */
struct found {
	void *symbol;		/* the answer, if `elsewhere` is NULL */
	void *elsewhere;	/* libc's dlsym, to jump to */
};

struct found hook_find(void *handle, const char *name);

#if defined(__x86_64__)
__asm__(".text\n"
	".globl dlsym\n"
	".type dlsym, @function\n"
	"dlsym:\n"
	"	.cfi_startproc\n"
	"	push %rdi\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	push %rsi\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	sub $8, %rsp\n"
	"	.cfi_adjust_cfa_offset 8\n"
	"	call hook_find\n"
	"	add $8, %rsp\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	pop %rsi\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	pop %rdi\n"
	"	.cfi_adjust_cfa_offset -8\n"
	"	test %rdx, %rdx\n"
	"	jnz 1f\n"
	"	ret\n"
	"1:	jmp *%rdx\n"
	"	.cfi_endproc\n"
	".size dlsym, . - dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
	".globl dlsym\n"
	".type dlsym, %function\n"
	"dlsym:\n"
	"	.cfi_startproc\n"
	"	stp x29, x30, [sp, #-32]!\n"
	"	.cfi_def_cfa_offset 32\n"
	"	.cfi_offset 29, -32\n"
	"	.cfi_offset 30, -24\n"
	"	stp x0, x1, [sp, #16]\n"
	"	bl hook_find\n"
	"	mov x2, x0\n"
	"	mov x3, x1\n"
	"	ldp x0, x1, [sp, #16]\n"
	"	ldp x29, x30, [sp], #32\n"
	"	.cfi_def_cfa_offset 0\n"
	"	.cfi_restore 29\n"
	"	.cfi_restore 30\n"
	"	cbnz x3, 1f\n"
	"	mov x0, x2\n"
	"	ret\n"
	"1:	br x3\n"
	"	.cfi_endproc\n"
	".size dlsym, . - dlsym\n");
#else
#error "dlsym needs its few instructions for this machine"
#endif

/*
 * Look up by the two special handles. libc would find the library's wrapper under RTLD_DEFAULT whether libcuda is there
 * or not; the program is told that the symbol is missing until it has loaded libcuda. A definition that comes before
 * the library's, such as the program's own, is returned as it is.
 */
static void *in_scope(void *handle, const char *name)
{
	void *first = handle == RTLD_DEFAULT ? driver_dlsym(RTLD_DEFAULT, name) : NULL;
	void *wrapper = driver_loaded() ? caught_wrapper(name) : NULL;

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
	if (!symbol || !driver_loaded())
		return symbol;
	wrapper = caught_at(symbol);
	return wrapper ? wrapper : symbol;
}

static __attribute__((noinline)) struct found find(void *handle, const char *name)
{
	struct found found = { NULL, NULL };

	/* A constructor of libcuda looks something up, before the library is ready. */
	if (ours_inside() || !caught_is(name)) {
		found.elsewhere = driver_libc_dlsym();
		return found;
	}
	ours_enter();
	found.symbol = handle == RTLD_DEFAULT || handle == RTLD_NEXT ?
		in_scope(handle, name) : by_handle(handle, name);
	ours_leave();
	return found;
}

/* The runtime of a sanitizer calls dlsym before it is ready for instrumented code. */
EARLY __attribute__((visibility("hidden"), used))
struct found hook_find(void *handle, const char *name)
{
	struct found found = { NULL, NULL };

	if (name && name[0] == 'c' && name[1] == 'u')
		return find(handle, name);
	found.elsewhere = driver_libc_dlsym();
	return found;
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
