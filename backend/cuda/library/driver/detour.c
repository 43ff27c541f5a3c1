// SPDX-License-Identifier: Apache-2.0
/*
 * Each stream that kernels were launched in under a limit has a line, which is never freed, but used again. Its lock is
 * held while it goes out or home, and for the launch in between: so all threads see a stream either home, or away with
 * every kernel before theirs.
 *
 * `lock` is for the tables alone: a line is locked without it, and it is not taken with a line locked; with it held,
 * only one that no other thread launches in. Two lines are never locked at once.
 */

#include "detour.h"

#include <errno.h>
#include <stdlib.h>

#include "driver.h"
#include "gate.h"
#include "life.h"
#include "log.h"
#include "map.h"
#include "moment.h"
#include "stream.h"
#include "totals.h"

/* Microseconds that the listening thread waits for launches that began before a limit ended. */
#define PASS_US 20000
/* Microseconds from which on a stream that a launch had to make first is told of: people look for what takes long. */
#define LONG_US 500

/* The stream of a line on some groups. */
struct branch {
	struct branch *next;
	struct green *green;
	CUstream stream;
	CUevent home;		/* recorded in it */
};

/* Atomically, without an order. */
#define READ(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define WRITE(field, value) __atomic_store_n(&(field), value, __ATOMIC_RELAXED)

struct line {
	struct line *next;
	pthread_mutex_t lock;
	/* Under `lock`; what is read without it, by READ, is written by WRITE. */
	bool live;
	CUstream stream;	/* CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, or a handle */
	CUcontext context;
	CUdevice ordinal;	/* -1: unknown */
	uint64_t thread;	/* whose own stream it is; 0: it is none */
	bool blocking;		/* it waits for the legacy stream, and vice versa */
	bool primary;		/* its context is the primary one */
	int priority;
	CUevent out;		/* recorded in it */
	struct branch *away;	/* NULL: at home */
	struct branch *branches;
	uint64_t seen;		/* what it had to come behind when it went out (behind) */
	uint64_t worked;	/* atomically, without the lock: calls that put work into it at home */
};

static struct limit {
	uint64_t mask;		/* atomically; 0: none */
	CUcontext ending;	/* atomically: the primary context, which may be about to be destroyed; NULL: none */
	bool counted;		/* of the listening thread: in detour_any */
} limits[GG_ORDINALS];

unsigned int detour_any;
bool detour_known;
static struct line *all;		/* atomically; prepended under `lock` */
static struct map handles;		/* under `lock`; of CUstream to struct line */
static struct map legacies;		/* under `lock`; of CUcontext to the line of its legacy stream */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Atomically: lines that are away, legacy streams, and other blocking streams. */
static unsigned int legacies_away, blocking_away;
/* Atomically: times that such streams were joined, or given work at home. */
static uint64_t legacies_worked, blocking_worked;
static __thread struct line *own;	/* the line of the last own stream of this thread */

static struct line *first(void)
{
	return __atomic_load_n(&all, __ATOMIC_ACQUIRE);
}

static unsigned int *away_count(const struct line *line)
{
	return line->stream == CU_STREAM_LEGACY ? &legacies_away : line->blocking ? &blocking_away : NULL;
}

static void note_away(struct line *line, struct branch *branch)
{
	unsigned int *count = away_count(line);

	if (count && !line->away != !branch)
		__atomic_add_fetch(count, branch ? 1 : -1U, __ATOMIC_SEQ_CST);
	__atomic_store_n(&line->away, branch, __ATOMIC_RELEASE);
}

/* Return what kernels of a line have to come behind that is at home, as a number that grows with it: with work of its
 * own stream, and of those that it waits for by itself. */
static uint64_t behind(const struct line *line)
{
	uint64_t *const others = line->stream == CU_STREAM_LEGACY ? &blocking_worked : &legacies_worked;
	const uint64_t own = __atomic_load_n(&line->worked, __ATOMIC_SEQ_CST);

	return own + (line->blocking ? __atomic_load_n(others, __ATOMIC_SEQ_CST) : 0);
}

/* Note that work was put into a stream at home. */
static void note_worked(bool legacy, bool blocking)
{
	if (legacy || blocking)
		__atomic_add_fetch(legacy ? &legacies_worked : &blocking_worked, 1, __ATOMIC_SEQ_CST);
}

/* Lines */

/* Return whether a line is that of a thread's own stream. */
static bool is_own_of(struct line *line, const struct stream_key *key)
{
	bool is_it;

	/* A lock may be held for long by a thread that launches, but not that of a stream of this thread. */
	if (READ(line->thread) != key->thread)
		return false;
	pthread_mutex_lock(&line->lock);
	is_it = line->live && line->thread == key->thread && line->context == key->context;
	pthread_mutex_unlock(&line->lock);
	return is_it;
}

/* Learn what a stream is, by the driver. */
static void learn(struct line *line)
{
	CUcontext before;
	unsigned int flags = CU_STREAM_DEFAULT;
	CUdevice ordinal = -1;

	WRITE(line->ordinal, -1);
	WRITE(line->blocking, true);
	if (real.cuCtxPushCurrent_v2(line->context))
		return;
	if (real.cuCtxGetDevice(&ordinal) || ordinal >= GG_ORDINALS)
		ordinal = -1;
	WRITE(line->ordinal, ordinal);
	line->primary = line->ordinal >= 0 && line->context == green_primary(line->ordinal);
	if (line->stream != CU_STREAM_LEGACY && !line->thread) {
		if (!real.cuStreamGetFlags || real.cuStreamGetFlags(line->stream, &flags))
			line->primary = false;
		WRITE(line->blocking, !(flags & CU_STREAM_NON_BLOCKING));
		if (real.cuStreamGetPriority && real.cuStreamGetPriority(line->stream, &line->priority))
			line->priority = 0;
	}
	real.cuCtxPopCurrent_v2(&before);
}

/* Return an unused line; NULL without memory. With `lock` held. A line that was one of a thread's own streams keeps its
 * branches for the next thread. */
static struct line *unused(CUcontext own_of)
{
	struct line *line;

	for (line = all; line; line = line->next) {
		bool serves;

		if (__atomic_load_n(&line->live, __ATOMIC_ACQUIRE))
			continue;
		pthread_mutex_lock(&line->lock);
		serves = !line->branches || (own_of && line->context == own_of);
		pthread_mutex_unlock(&line->lock);
		if (serves)
			return line;
	}
	line = calloc(1, sizeof(*line));
	if (!line)
		return NULL;
	pthread_mutex_init(&line->lock, NULL);
	line->next = all;
	__atomic_store_n(&all, line, __ATOMIC_RELEASE);
	return line;
}

static struct line *make(CUstream stream, CUcontext context, uint64_t thread)
{
	struct line *line = unused(thread ? context : NULL);

	if (!line)
		return NULL;
	pthread_mutex_lock(&line->lock);
	WRITE(line->stream, stream);
	WRITE(line->context, context);
	WRITE(line->thread, thread);
	line->priority = 0;
	learn(line);
	__atomic_store_n(&line->live, true, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&line->lock);
	__atomic_store_n(&detour_known, true, __ATOMIC_RELAXED);
	return line;
}

static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

/* A thread has ended. Its own streams are home; what the library has for them serves the next thread. */
static void thread_ended(void *number)
{
	for (struct line *line = first(); line; line = line->next) {
		if (READ(line->thread) != (uintptr_t)number)
			continue;
		pthread_mutex_lock(&line->lock);
		if (line->live && line->thread == (uintptr_t)number)
			__atomic_store_n(&line->live, false, __ATOMIC_RELEASE);
		pthread_mutex_unlock(&line->lock);
	}
}

static void own_prepare(void)
{
	pthread_key_create(&own_key, thread_ended);
}

static struct line *own_line(const struct stream_key *key)
{
	struct line *line = own;

	if (line && is_own_of(line, key))
		return line;
	pthread_mutex_lock(&lock);
	for (line = all; line && !is_own_of(line, key); line = line->next)
		;
	if (!line)
		line = make(CU_STREAM_PER_THREAD, key->context, key->thread);
	pthread_mutex_unlock(&lock);
	pthread_once(&own_once, own_prepare);
	pthread_setspecific(own_key, (void *)(uintptr_t)key->thread);
	own = line;
	return line;
}

static struct line *find(const struct stream_key *key)
{
	const bool legacy = key->stream == CU_STREAM_LEGACY;
	struct line *line;

	pthread_mutex_lock(&lock);
	line = legacy ? map_get(&legacies, key->context) : map_get(&handles, key->stream);
	pthread_mutex_unlock(&lock);
	return line;
}

/* Return the line of a stream, made on first use; NULL without memory, and where the driver does not know the
 * stream. */
static struct line *line_of(const struct stream_key *key)
{
	const bool legacy = key->stream == CU_STREAM_LEGACY;
	struct line *line = key->thread ? own_line(key) : find(key);
	CUcontext context = key->context;
	CUstreamCaptureMode mode;

	if (line || key->thread)
		return line;
	mode = driver_enter();
	if (!context && (!real.cuStreamGetCtx || real.cuStreamGetCtx(key->stream, &context)))
		context = NULL;
	if (!context) {
		driver_leave(mode);
		return NULL;
	}
	pthread_mutex_lock(&lock);
	line = legacy ? map_get(&legacies, context) : map_get(&handles, key->stream);
	if (!line) {
		line = make(key->stream, context, 0);
		if (line && !(legacy ? map_put(&legacies, context, line) : map_put(&handles, key->stream, line))) {
			__atomic_store_n(&line->live, false, __ATOMIC_RELEASE);
			line = NULL;
		}
	}
	pthread_mutex_unlock(&lock);
	driver_leave(mode);
	return line;
}

/* Out and home; with the line locked, and within driver_enter. */

/* Make the context of a line current; false where it is not to be had. */
static bool enter(struct line *line)
{
	return !real.cuCtxPushCurrent_v2(line->context);
}

static void leave(void)
{
	CUcontext context;

	real.cuCtxPopCurrent_v2(&context);
}

static void come_home(struct line *line)
{
	struct branch *branch = line->away;
	bool joined;

	if (!branch)
		return;
	joined = enter(line);
	if (joined) {
		joined = !real.cuEventRecord(branch->home, branch->stream) &&
			 !real.cuStreamWaitEvent(line->stream, branch->home, 0);
		leave();
	}
	/* An error here is that of a context which is broken: the program's next call gets it, too. */
	if (!joined)
		log_line("stream %p: not joined with that of the library", (void *)line->stream);
	/* In this order: a thread that finds it home finds what it is to come behind, too. */
	note_worked(line->stream == CU_STREAM_LEGACY, line->blocking);
	note_away(line, NULL);
}

static void free_branch(struct branch *branch)
{
	if (branch->stream)
		real.cuStreamDestroy_v2(branch->stream);
	if (branch->home)
		real.cuEventDestroy_v2(branch->home);
	free(branch);
}

/* Return the stream on these groups, made on first use. */
static struct branch *branch_on(struct line *line, uint64_t mask)
{
	struct branch *branch;
	struct green *green;
	uint64_t begun;

	for (branch = line->branches; branch; branch = branch->next)
		if (branch->green->mask == mask)
			return branch;
	begun = moment_us();
	green = green_on(line->ordinal, mask);
	branch = green ? calloc(1, sizeof(*branch)) : NULL;
	if (!branch)
		return NULL;
	branch->green = green;
	branch->home = green_event(green->context);
	if (!branch->home ||
	    real.cuGreenCtxStreamCreate(&branch->stream, green->handle, CU_STREAM_NON_BLOCKING, line->priority)) {
		branch->stream = NULL;
		free_branch(branch);
		return NULL;
	}
	branch->next = line->branches;
	line->branches = branch;
	if (moment_us() - begun >= LONG_US)
		log_line("device %d: a stream on the groups %#llx took %llu us", line->ordinal,
			 (unsigned long long)mask, (unsigned long long)(moment_us() - begun));
	return branch;
}

/* Return whether a line is away on these groups, and nothing has to come between its last kernel there and the next. */
static bool is_out(const struct line *line, uint64_t mask)
{
	return line->away && line->away->green->mask == mask && line->seen == behind(line);
}

static bool go_out(struct line *line, struct branch *branch)
{
	bool joined;

	if (is_out(line, branch->green->mask))
		return true;
	come_home(line);
	line->seen = behind(line);
	if (!line->out)
		line->out = green_event(line->context);
	if (!line->out || !enter(line))
		return false;
	joined = !real.cuEventRecord(line->out, line->stream) && !real.cuStreamWaitEvent(branch->stream, line->out, 0);
	leave();
	if (joined)
		note_away(line, branch);
	return joined;
}

/* Which streams go home */

struct which {
	CUcontext context;	/* NULL: any */
	bool legacy;		/* legacy streams alone */
	bool blocking;		/* blocking streams alone, and legacy ones not */
};

/* With the line locked; or not, for one that this thread, or one that it has heard of since, has sent away. */
static bool is_one(const struct line *line, const struct which *which)
{
	const bool legacy = READ(line->stream) == CU_STREAM_LEGACY;

	return __atomic_load_n(&line->live, __ATOMIC_ACQUIRE) && __atomic_load_n(&line->away, __ATOMIC_ACQUIRE) &&
	       (!which->context || READ(line->context) == which->context) && (!which->legacy || legacy) &&
	       (!which->blocking || (READ(line->blocking) && !legacy));
}

static void home_those(const struct which *which)
{
	for (struct line *line = first(); line; line = line->next) {
		/* A thread that launches may have another one locked until the GPU has room for more, and the GPU may
		 * have to wait for this thread. */
		if (!is_one(line, which))
			continue;
		pthread_mutex_lock(&line->lock);
		if (is_one(line, which)) {
			const CUstreamCaptureMode mode = driver_enter();

			come_home(line);
			driver_leave(mode);
		}
		pthread_mutex_unlock(&line->lock);
	}
}

static void home_legacy(CUcontext context)
{
	if (__atomic_load_n(&legacies_away, __ATOMIC_SEQ_CST))
		home_those(&(struct which){ .context = context, .legacy = true });
}

static void home_blocking(CUcontext context)
{
	if (__atomic_load_n(&blocking_away, __ATOMIC_SEQ_CST))
		home_those(&(struct which){ .context = context, .blocking = true });
}

static void home_line(struct line *line)
{
	pthread_mutex_lock(&line->lock);
	if (line->live && line->away) {
		const CUstreamCaptureMode mode = driver_enter();

		come_home(line);
		driver_leave(mode);
	}
	pthread_mutex_unlock(&line->lock);
}

/* Bring home what work in a stream of this kind waits for by itself: the legacy stream for blocking ones, and vice
 * versa. A stream that is not known yet may be blocking. */
static void home_others(const struct line *line, bool legacy, CUcontext context)
{
	if (legacy)
		home_blocking(context);
	else if (!line || line->blocking)
		home_legacy(line ? line->context : NULL);
}

void detour_home(CUstream stream, bool per_thread)
{
	struct stream_key key;
	struct line *line;

	ours_enter();
	key = stream_key(stream, per_thread);
	line = key.thread ? NULL : find(&key);
	home_others(line, key.stream == CU_STREAM_LEGACY, key.context);
	if (line)
		home_line(line);
	ours_leave();
}

void detour_worked(CUstream stream, bool per_thread)
{
	struct stream_key key;
	struct line *line;

	ours_enter();
	key = stream_key(stream, per_thread);
	line = key.thread ? NULL : find(&key);
	if (line)
		__atomic_add_fetch(&line->worked, 1, __ATOMIC_SEQ_CST);
	note_worked(key.stream == CU_STREAM_LEGACY, !line || line->blocking);
	ours_leave();
}

void detour_worked_context(CUcontext context)
{
	for (struct line *line = first(); line; line = line->next)
		if (__atomic_load_n(&line->live, __ATOMIC_ACQUIRE) && READ(line->context) == context)
			__atomic_add_fetch(&line->worked, 1, __ATOMIC_SEQ_CST);
	note_worked(true, true);
	note_worked(false, true);
}

void detour_home_context(CUcontext context)
{
	if (context)
		home_those(&(struct which){ .context = context });
}

void detour_home_all(void)
{
	home_those(&(struct which){ 0 });
}

bool detour_home_at_once(CUstream stream, CUcontext context)
{
	const struct stream_key key = { .stream = stream, .context = context };
	struct line *line = find(&key);

	if (!line)
		return true;
	if (pthread_mutex_trylock(&line->lock))
		return false;
	if (line->live && line->away) {
		const CUstreamCaptureMode mode = driver_enter();

		come_home(line);
		driver_leave(mode);
	}
	pthread_mutex_unlock(&line->lock);
	return true;
}

/* Launches */

uint64_t detour_mask(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < GG_ORDINALS ? __atomic_load_n(&limits[ordinal].mask, __ATOMIC_RELAXED) : 0;
}

/* Whether a stream of this line may go away at all, now. */
static bool may_go(const struct line *line)
{
	return line->primary && !__atomic_load_n(&limits[line->ordinal].ending, __ATOMIC_SEQ_CST) &&
	       !(line->stream == CU_STREAM_LEGACY && stream_capturing_any());
}

static unsigned int sms_of(CUdevice ordinal, uint64_t mask)
{
	struct green_shape shape;

	return green_shape(ordinal, &shape) ? 0 : (unsigned int)__builtin_popcountll(mask) * shape.each;
}

/* Go out, or home, for a launch; false where it is to be made in the program's stream. With the line locked. */
static bool go(struct line *line, uint64_t mask, detour_fits *fits, void *argument)
{
	CUstreamCaptureMode mode;
	struct branch *branch = NULL;
	bool goes;

	/* Most launches find their stream where the one before left it. */
	if (is_out(line, mask) && may_go(line) &&
	    fits(sms_of(line->ordinal, mask), line->away->stream, argument))
		return true;
	mode = driver_enter();
	if (mask && may_go(line))
		branch = branch_on(line, mask);
	goes = branch && fits(sms_of(line->ordinal, mask), branch->stream, argument) && go_out(line, branch);
	if (!goes)
		come_home(line);
	driver_leave(mode);
	return goes;
}

bool detour_begin(struct detour *detour, CUstream stream, bool per_thread, detour_fits *fits, void *argument)
{
	struct stream_key key;
	struct line *line;
	uint64_t mask = 0;
	bool goes = false;

	ours_enter();
	key = stream_key(stream, per_thread);
	line = line_of(&key);
	home_others(line, key.stream == CU_STREAM_LEGACY, key.context);
	if (line) {
		mask = detour_mask(line->ordinal);
		pthread_mutex_lock(&line->lock);
		goes = go(line, mask, fits, argument);
		if (goes)
			*detour = (struct detour){ line->away->stream, line->away->green, line };
		else
			pthread_mutex_unlock(&line->lock);
	}
	if (mask && !goes)
		totals_placed(line->ordinal, 0, 1);
	ours_leave();
	return goes;
}

static bool nothing_fits(unsigned int sms, CUstream stream, void *unused)
{
	(void)sms;
	(void)stream;
	(void)unused;
	return false;
}

void detour_stay(CUstream stream, bool per_thread)
{
	struct detour unused;

	detour_begin(&unused, stream, per_thread, nothing_fits, NULL);
}

bool detour_end(struct detour *detour, CUresult result)
{
	struct line *line = detour->line;

	if (result || line->thread) {
		const CUstreamCaptureMode mode = driver_enter();

		come_home(line);
		driver_leave(mode);
	}
	totals_placed(line->ordinal, !result, result != CUDA_SUCCESS);
	pthread_mutex_unlock(&line->lock);
	return !result;
}

/* Limits */

static void count(struct limit *limit, bool counted)
{
	if (limit->counted != counted)
		__atomic_add_fetch(&detour_any, counted ? 1 : -1U, __ATOMIC_SEQ_CST);
	limit->counted = counted;
}

/* Try to bring everything home that is of one GPU, by the listening thread; false while a thread launches. */
static bool home_device(CUdevice ordinal)
{
	bool all_home = true;

	for (struct line *line = first(); line; line = line->next) {
		if (pthread_mutex_trylock(&line->lock)) {
			all_home = false;
			continue;
		}
		if (line->live && line->ordinal == ordinal) {
			const CUstreamCaptureMode mode = driver_enter();

			come_home(line);
			driver_leave(mode);
		}
		pthread_mutex_unlock(&line->lock);
	}
	return all_home;
}

int detour_limit(struct device *device, uint64_t mask)
{
	struct limit *limit = &limits[device->ordinal];
	const uint64_t begun = moment_us();
	CUstreamCaptureMode mode;
	struct green_shape shape;
	int error = 0;

	if (mask == detour_mask(device->ordinal))
		return 0;
	mode = driver_enter();
	if (mask && green_shape(device->ordinal, &shape))
		error = EOPNOTSUPP;
	else if (mask && shape.groups < GREEN_GROUPS && mask >> shape.groups)
		error = EINVAL;
	else if (mask && device_borrow(device)) {
		/* Now, as a driver that cannot make it is to be known before the limit is said to hold. */
		if (green_primary(device->ordinal) && !green_on(device->ordinal, mask))
			error = EOPNOTSUPP;
		device_return(device);
	}
	driver_leave(mode);
	if (error)
		return error;
	__atomic_store_n(&limit->mask, mask, __ATOMIC_SEQ_CST);
	log_line("device %d: kernels run on the groups %#llx, after %llu us", device->ordinal, (unsigned long long)mask,
		 (unsigned long long)(moment_us() - begun));
	if (mask)
		count(limit, true);
	/* A launch that saw the former limit is over, or has its stream locked. Where one is not, streams may be away,
	 * and the calls that bring them home go on being made. */
	else if (limit->counted && gate_pass(PASS_US) && home_device(device->ordinal))
		count(limit, false);
	return 0;
}

/* Ends */

/* Destroy what the library has for a line, whose context may be `destroyed`; with the line locked and home, within
 * driver_enter. */
static void strip(struct line *line, bool destroyed)
{
	for (struct branch *branch = line->branches, *next; branch; branch = next) {
		next = branch->next;
		free_branch(branch);
	}
	line->branches = NULL;
	if (line->out && !destroyed)
		real.cuEventDestroy_v2(line->out);
	line->out = NULL;
}

static void retire(struct line *line, bool destroyed)
{
	strip(line, destroyed);
	note_away(line, NULL);
	__atomic_store_n(&line->live, false, __ATOMIC_RELEASE);
}

void detour_stream_ends(CUstream stream)
{
	CUstreamCaptureMode mode;
	struct line *line;

	pthread_mutex_lock(&lock);
	line = map_take(&handles, stream);
	pthread_mutex_unlock(&lock);
	if (!line)
		return;
	mode = driver_enter();
	pthread_mutex_lock(&line->lock);
	come_home(line);
	retire(line, false);
	pthread_mutex_unlock(&line->lock);
	driver_leave(mode);
}

/* Destroy the green contexts of a GPU, with what the library has in them, once that has run. */
static void give_up(CUdevice ordinal)
{
	const CUstreamCaptureMode mode = driver_enter();

	for (struct line *line = first(); line; line = line->next) {
		if (READ(line->ordinal) != ordinal)
			continue;
		pthread_mutex_lock(&line->lock);
		if (line->branches && line->ordinal == ordinal) {
			come_home(line);
			if (enter(line)) {
				for (struct branch *branch = line->branches; branch; branch = branch->next)
					real.cuStreamSynchronize(branch->stream);
				leave();
			}
			strip(line, false);
		}
		pthread_mutex_unlock(&line->lock);
	}
	green_end(ordinal);
	driver_leave(mode);
}

void detour_context_ends(CUcontext context)
{
	const CUdevice ordinal = context ? green_keeps(context) : -1;

	if (ordinal < 0)
		return;
	__atomic_store_n(&limits[ordinal].ending, context, __ATOMIC_SEQ_CST);
	give_up(ordinal);
}

void detour_release(struct device *device)
{
	give_up(device->ordinal);
}

void detour_context_ended(CUcontext context, bool gone)
{
	pthread_mutex_lock(&lock);
	for (struct line *line = gone ? all : NULL; line; line = line->next) {
		if (READ(line->context) != context)
			continue;
		pthread_mutex_lock(&line->lock);
		if (line->live && line->context == context) {
			if (line->stream == CU_STREAM_LEGACY)
				map_take(&legacies, context);
			else if (!line->thread)
				map_take(&handles, line->stream);
			retire(line, true);
		}
		pthread_mutex_unlock(&line->lock);
	}
	pthread_mutex_unlock(&lock);
	for (size_t i = 0; i < GG_ORDINALS; i++)
		if (context && __atomic_load_n(&limits[i].ending, __ATOMIC_SEQ_CST) == context)
			__atomic_store_n(&limits[i].ending, NULL, __ATOMIC_SEQ_CST);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	all = own = NULL;
	handles = legacies = (struct map){ 0 };
	legacies_away = blocking_away = detour_any = 0;
	legacies_worked = blocking_worked = 0;
	detour_known = false;
	for (size_t i = 0; i < GG_ORDINALS; i++)
		limits[i] = (struct limit){ 0 };
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
