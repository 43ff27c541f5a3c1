/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of the entry points of entries.def by a generator. Each call is counted, and one of its calls of the driver
 * may fail. An entry point that fails so has changed nothing: it is called again, and must succeed.
 */
#ifndef UNIT_CALLS_H
#define UNIT_CALLS_H

#include "double.h"

enum entry {
#define ENTRY(name, ...) ENTRY_##name,
#include "entries.def"
#undef ENTRY
	ENTRIES,
};

/* Called first, by the thread that makes all calls. `faults`: whether calls of the driver fail. */
void calls_start(bool faults);
/* Let no call of the driver fail from here on. */
void calls_spare(void);
/* Enclose each call. `calls_end` returns false if the call failed because of a driver call: it has to be repeated. */
void calls_begin(enum entry entry);
bool calls_end(enum entry entry, CUresult result, CUresult expected, const char *file, int line);
/*
 * End the test unless every entry point about memory, or about a context with memory, has succeeded, and with faults,
 * was called with each of its driver calls failing in turn.
 */
void calls_check_all(void);
/* Return whether that holds for each entry point called so far: some are called only at the end. */
bool calls_finished(void);
/* Print the last calls to stderr. */
void calls_say(void);
/* Return the number of calls, and of faults. */
uint64_t calls_made(void);
uint64_t calls_faults(void);

/* Call an entry point, which must answer `expected`; otherwise the test ends. */
#define CALL(expected, name, arguments)										\
	do {													\
		CUresult result_;										\
														\
		do {												\
			calls_begin(ENTRY_##name);								\
			result_ = name arguments;								\
		} while (!calls_end(ENTRY_##name, result_, expected, __FILE__, __LINE__));			\
	} while (0)
#define DO(name, arguments) CALL(CUDA_SUCCESS, name, arguments)

#endif
