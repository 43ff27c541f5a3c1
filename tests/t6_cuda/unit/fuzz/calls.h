/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The entry points of entries.def as a generator calls them: each call is counted, and may have one of the driver's calls
 * within it fail. An entry point that fails so has changed nothing: it is called again, and is to succeed.
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

/* Before the first call, by the thread that makes them all. `faults`: whether calls of the driver fail. */
void calls_start(bool faults);
/* No call of the driver fails from here on. */
void calls_spare(void);
/* Around each call. False of `calls_end`: the call failed as one of the driver's failed; it is to be made again. */
void calls_begin(enum entry entry);
bool calls_end(enum entry entry, CUresult result, CUresult expected, const char *file, int line);
/* Ends the test unless every entry point about memory, or about a context that has some, has succeeded, and with faults,
 * was called with each of its calls of the driver failing in turn. */
void calls_check_all(void);
/* Whether that is so of each that was called by now: some are only at the end. */
bool calls_finished(void);
/* The last calls, on stderr. */
void calls_say(void);
/* How many there were, and how many faults. */
uint64_t calls_made(void);
uint64_t calls_faults(void);

/* Calls an entry point, whose answer is to be `expected`, else the test ends. */
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
