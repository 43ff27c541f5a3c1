// SPDX-License-Identifier: Apache-2.0
#include "calls.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "model.h"
#include "moves.h"

/* Calls of the driver per one in which memory moves. */
#define MOVES_EVERY 40

/* Calls that are listed when a test ends with an error. */
#define LAST 12

/* Counts for a row of entries.def. */
static struct {
	const char *const name;
	const char *const kind;
	uint64_t right;		/* calls that succeeded */
	uint64_t faults;	/* calls of the driver within it that failed */
	uint64_t walks;		/* number of times that all of them have failed */
	uint64_t next;		/* index of the one to fail in the next call */
} rows[] = {
#define ENTRY(name, kind, ...) { #name, #kind, 0, 0, 0, 1 },
#include "entries.def"
#undef ENTRY
};

static __thread bool calls_here;	/* the thread that makes the calls */
static bool faulty;
static bool spared, rests;		/* no call fails: for good; in the next call, so that the state advances */
static uint64_t all_faults;

/* The call being made. */
static enum entry making;
static bool armed;			/* atomically */
static uint64_t left;			/* atomically: driver calls until one fails */
static bool fired;			/* atomically */
static const char *fault;		/* atomically: the one that failed */
static CUresult code;			/* atomically */

/* The last calls, listed when a test ends with an error. */
static struct made {
	const char *name, *fault;	/* NULL: no fault */
	uint64_t number;
	CUresult result;
} last[LAST];
static uint64_t made;

/* Calls that only describe the process, or undo something, fail for no reason of their own: if they do, all others fail
 * at once and for good. */
static bool may_fail(const char *name)
{
	static const char *const never[] = { "cuCtxGetCurrent", "cuCtxGetDevice", "cuDeviceGetAttribute",
					     "cuCtxGetApiVersion", "cuCtxPopCurrent_v2" };

	for (size_t i = 0; i < sizeof(never) / sizeof(never[0]); i++)
		if (!strcmp(never[i], name))
			return false;
	return true;
}

/* Called by every call of the driver, in every thread: work done on behalf of a call is part of it. */
static CUresult on_call(const char *name)
{
	if (!__atomic_load_n(&armed, __ATOMIC_ACQUIRE))
		return CUDA_SUCCESS;
	if (calls_here && !model_odd(MOVES_EVERY))
		moves_within();
	if (faulty && may_fail(name) && __atomic_fetch_sub(&left, 1, __ATOMIC_ACQ_REL) == 1) {
		__atomic_store_n(&fault, name, __ATOMIC_RELAXED);
		__atomic_store_n(&fired, true, __ATOMIC_RELEASE);
		return __atomic_load_n(&code, __ATOMIC_RELAXED);
	}
	return CUDA_SUCCESS;
}

void calls_say(void)
{
	for (uint64_t i = made > LAST ? made - LAST : 0; i < made; i++) {
		const struct made *one = &last[i % LAST];

		fprintf(stderr, "%s: %d", one->name, (int)one->result);
		if (one->fault)
			fprintf(stderr, ", call %llu of the driver failed, %s", (unsigned long long)one->number,
				one->fault);
		fprintf(stderr, "\n");
	}
	if (__atomic_load_n(&armed, __ATOMIC_ACQUIRE))
		fprintf(stderr, "within %s, whose call %llu was to fail; %s did\n", rows[making].name,
			(unsigned long long)rows[making].next,
			__atomic_load_n(&fired, __ATOMIC_ACQUIRE) ? __atomic_load_n(&fault, __ATOMIC_RELAXED) : "none");
}

static void say_at_end(int status, void *unused)
{
	(void)unused;
	if (status)
		calls_say();
}

void calls_start(bool faults)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	void (*hook)(CUresult (*)(const char *)) = driver_dlsym(library, "fake_on_call");

	faulty = faults;
	calls_here = true;
	hook(on_call);
	CHECK(!on_exit(say_at_end, NULL));
}

void calls_spare(void)
{
	spared = true;
}

void calls_begin(enum entry entry)
{
	making = entry;
	__atomic_store_n(&code, all_faults % 2 ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_OUT_OF_MEMORY, __ATOMIC_RELAXED);
	__atomic_store_n(&fired, false, __ATOMIC_RELEASE);
	__atomic_store_n(&left, rests || spared ? 0 : rows[entry].next, __ATOMIC_RELEASE);
	__atomic_store_n(&armed, true, __ATOMIC_RELEASE);
}

bool calls_end(enum entry entry, CUresult result, CUresult expected, const char *file, int line)
{
	bool failed;

	__atomic_store_n(&armed, false, __ATOMIC_RELEASE);
	failed = __atomic_load_n(&fired, __ATOMIC_ACQUIRE);
	last[made++ % LAST] = (struct made){ rows[entry].name,
					     failed ? __atomic_load_n(&fault, __ATOMIC_RELAXED) : NULL,
					     rows[entry].next, result };
	if (failed) {
		rows[entry].faults++;
		/* All of the first ones, then at growing distances: a move has hundreds. */
		rows[entry].next += 1 + rows[entry].next / 8;
		all_faults++;
	} else if (faulty && !rests && !spared) {
		rows[entry].walks++;
		rows[entry].next = 1;
	}
	if (result == expected) {
		rows[entry].right += result == CUDA_SUCCESS;
		rests = false;
		return true;
	}
	if (!failed) {
		fprintf(stderr, "%s:%d: %s is %d, not %d\n", file, line, rows[entry].name, (int)result, (int)expected);
		exit(1);
	}
	rests = true;
	return false;
}

/* Whether an entry point makes, maps, shares or frees memory. */
static bool is_asked(size_t i)
{
	if (strcmp(rows[i].kind, "MEMORY") && strcmp(rows[i].kind, "CONTEXT"))
		return false;
	/* Calls that describe memory neither make nor move any. */
	return strncmp(rows[i].name, "cuTensorMap", strlen("cuTensorMap"));
}

/* Whether the entry point has succeeded once, and, with faults, each driver call within it has failed once. */
static bool is_reached(size_t i)
{
	return rows[i].right && (!faulty || (rows[i].faults && rows[i].walks));
}

bool calls_finished(void)
{
	for (size_t i = 0; i < ENTRIES; i++)
		if (is_asked(i) && !is_reached(i))
			return false;
	return true;
}

void calls_check_all(void)
{
	const char *without = getenv("UNIT_WITHOUT");	/* to test this check */
	bool all = true;

	for (size_t i = 0; i < ENTRIES; i++) {
		if (!is_asked(i))
			continue;
		if (without && !strcmp(without, rows[i].name))
			rows[i].right = 0;
		if (!is_reached(i)) {
			fprintf(stderr, "%s: %llu right, %llu faults, %llu times all of them\n", rows[i].name,
				(unsigned long long)rows[i].right, (unsigned long long)rows[i].faults,
				(unsigned long long)rows[i].walks);
			all = false;
		}
	}
	CHECK(all);
}

uint64_t calls_made(void)
{
	return made;
}

uint64_t calls_faults(void)
{
	return all_faults;
}
