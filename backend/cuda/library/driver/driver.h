/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The real driver. `real.cuMemAlloc_v2(...)` calls libcuda.so.1's own function; every entry point that the library
 * calls or catches is here.
 */
#ifndef GGROUP_CUDA_DRIVER_H
#define GGROUP_CUDA_DRIVER_H

#include <stdbool.h>

#include "api.h"
#include "ours.h"

/* A row ENTRY(name, ...) gives a pointer of that name; so does OURS(name), for an entry point that is called here but
 * not caught. NULL where this driver has no such entry point. */
struct driver {
#define ENTRY(name, ...) __typeof__(&name) name;
#define OURS(name) __typeof__(&name) name;
#include "entries.def"
#undef ENTRY
};

extern struct driver real;

/* Resolve all of them, once; false where there is no libcuda. */
bool driver_open(void);
/* Do the same, but only if the program has loaded libcuda itself. */
bool driver_loaded(void);
/* Call libc's own dlsym. */
void *driver_dlsym(void *handle, const char *name);
/* Return whether an address is in the object that this is linked into: a lookup in something that is not the driver may
 * find the library's wrappers. */
bool driver_is_ours(const void *pointer);

/* Return whether all of them are resolved; nothing is looked up. */
bool driver_opened(void);
/* Call libc's own dlopen, which the library's hides. */
void *driver_dlopen(const char *file, int flags);

void driver_forget(void);	/* in the child of fork(): only its lock; libcuda is still mapped */

/* Return libc's own function that the library's hides; NULL where no libc is known. */
enum driver_libc { LIBC_DLSYM, LIBC_DLVSYM, LIBC_DLOPEN, LIBC_HIDDEN };
void *driver_libc(enum driver_libc which);

/* Not instrumented by -fsanitize. */
#define EARLY __attribute__((no_sanitize("address", "thread", "undefined")))

/* Call the driver's function, with calls that libcuda makes in turn passing straight through. */
#define CALL_REAL(result, name, args)		\
	do {					\
		ours_enter();			\
		(result) = real.name args;	\
		ours_leave();			\
	} while (0)

/*
 * Begin calls of the library into the driver while the program may be capturing. They are allowed, since nothing of
 * them is in a stream of the program (cuThreadExchangeStreamCaptureMode). A capture in global mode, in any thread,
 * would otherwise be ended by a call that is unsafe in it.
 */
static inline CUstreamCaptureMode driver_enter(void)
{
	CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

	ours_enter();
	real.cuThreadExchangeStreamCaptureMode(&mode);
	return mode;
}

/* End them; `mode` is what driver_enter returned. */
static inline void driver_leave(CUstreamCaptureMode mode)
{
	real.cuThreadExchangeStreamCaptureMode(&mode);
	ours_leave();
}

/* Return the current context; NULL for none. */
static inline CUcontext driver_context(void)
{
	CUcontext context = NULL;

	return real.cuCtxGetCurrent && !real.cuCtxGetCurrent(&context) ? context : NULL;
}

#endif
