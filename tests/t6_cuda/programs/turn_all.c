/* SPDX-License-Identifier: Apache-2.0 */
/* LINK_LIBRARY: turn_all CASE: the gates of turns from the inside; the library is part of this program. */
#include <errno.h>
#include <stddef.h>
#include <sys/wait.h>

#include "common.h"
#include "counters.h"
#include "device.h"
#include "driver.h"
#include "gate.h"
#include "library.h"
#include "moment.h"
#include "stream.h"
#include "totals.h"
#include "turn.h"

#define THREADS 4
#define ROUNDS 200
#define AT_ONCE 4
#define SOON_US 2000000
#define LONG_US 60000000

static CUcontext context;
static struct device *device;
static uint64_t ran;		/* atomically */
static bool release;		/* atomically */

KERNEL(counts, sizeof(int))
{
	(void)parameters;
	__atomic_add_fetch(&ran, 1, __ATOMIC_SEQ_CST);
}

KERNEL(waits, sizeof(int))
{
	(void)parameters;
	while (!__atomic_load_n(&release, __ATOMIC_ACQUIRE))
		usleep(100);
	__atomic_add_fetch(&ran, 1, __ATOMIC_SEQ_CST);
}

static int zero;
static void *parameters[] = { &zero };

static void launch(const char *name, CUstream stream)
{
	DO(cuLaunchKernel(function(name), 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

static CUstream stream_new(void)
{
	CUstream stream;

	DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	return stream;
}

/* Something done in a thread of its own. */
struct doing {
	pthread_t thread;
	void (*what)(struct doing *);
	CUstream stream;
	CUcontext context;
	bool done;		/* atomically */
};

static void *run(void *argument)
{
	struct doing *doing = argument;

	DO(cuCtxSetCurrent(doing->context));
	doing->what(doing);
	__atomic_store_n(&doing->done, true, __ATOMIC_SEQ_CST);
	return NULL;
}

static bool is_done(const struct doing *doing)
{
	return __atomic_load_n(&doing->done, __ATOMIC_SEQ_CST);
}

static void begin_doing(struct doing *doing, void (*what)(struct doing *))
{
	doing->what = what;
	if (!doing->context)
		doing->context = context;
	CHECK(!pthread_create(&doing->thread, NULL, run, doing));
}

static void end_doing(struct doing *doing)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += LONG_US / 1000000;
	CHECK(!pthread_timedjoin_np(doing->thread, NULL, &until));
	CHECK(is_done(doing));
}

/* Waits until a thread is held at the gate of `at`; false: what it does was done instead. */
static bool is_held(const struct doing *doing, const struct device *at)
{
	const uint64_t until = microseconds() + LONG_US;

	while (!turn_waiting(at) && !is_done(doing)) {
		CHECK(microseconds() < until);
		usleep(200);
	}
	return turn_waiting(at) && !is_done(doing);
}

/* Waits until another thread has said so. */
static void wait_for(const bool *said)
{
	const uint64_t until = microseconds() + LONG_US;

	while (!__atomic_load_n(said, __ATOMIC_SEQ_CST)) {
		CHECK(microseconds() < until);
		usleep(200);
	}
}

static void over(struct device *of)
{
	bool drained;

	CHECK(!turn_end(of, SOON_US, &drained));
	CHECK(drained);
}

static void until_drained(void)
{
	const uint64_t until = microseconds() + LONG_US;
	bool drained = false;

	while (!drained) {
		CHECK(microseconds() < until);
		CHECK(!turn_end(device, 0, &drained));
	}
}

/* Every row of entries.def */

static long zeros[512];

#include "hook_faults.inc"

/* What is expected of a kind; one that is not here does not compile. */
#define HELD_LAUNCH(name) true
#define HELD_GATED(name) true
#define HELD_JOIN(name) true
#define HELD_LOOKS(name) false
#define HELD_TRANSFER(name) true
#define HELD_GRAPH(name) (!strncmp(name, "cuGraphLaunch", 13))
#define HELD_STREAM(name) (!strncmp(name, "cuStreamBegin", 13))
#define HELD_HOOK(name) false
#define HELD_CONTEXT(name) false
#define HELD_CODE(name) false
#define HELD_MEMORY(name) (!strncmp(name, "cuMemFreeAsync", 14) || !strncmp(name, "cuMemMapArrayAsync", 18))
#define HELD_WAIT(name) false
#define HELD_WAIT_STREAM(name) false
#define HELD_WAIT_CONTEXT(name) false
#define HELD_ADVICE(name) (strstr(name, "Prefetch") != NULL)

static const struct {
	const char *name;
	bool held;
	size_t offset;
} rows[] = {
#define ENTRY(name, kind, ...) { #name, HELD_##kind(#name), offsetof(struct driver, name) },
#include "entries.def"
#undef ENTRY
};

#define ROWS (sizeof(rows) / sizeof(rows[0]))

static uint64_t reached;	/* atomically: calls that came to the driver */

/* In the place of the driver: any of them, whatever its parameters. */
static CUresult refuse(void)
{
	__atomic_add_fetch(&reached, 1, __ATOMIC_SEQ_CST);
	return CUDA_ERROR_UNKNOWN;
}

static bool is_own(const char *name)
{
	const size_t length = strlen(name);

	return length > 5 && !strncmp(name + length - 5, "_pt", 3);
}

static size_t row_now;
static CUstream stream_now;
static int asked;		/* atomically: by which of the two below the driver was, bits */

/* The driver is asked of the very stream of the call, and in the form that says what stream 0 is. */
static CUresult is_capturing(bool own, CUstream stream, CUstreamCaptureStatus *status)
{
	CHECK(stream == stream_now);
	__atomic_or_fetch(&asked, 1 << own, __ATOMIC_SEQ_CST);
	*status = CU_STREAM_CAPTURE_STATUS_NONE;
	return CUDA_SUCCESS;
}

static CUresult is_capturing_legacy(CUstream stream, CUstreamCaptureStatus *status)
{
	return is_capturing(false, stream, status);
}

static CUresult is_capturing_own(CUstream stream, CUstreamCaptureStatus *status)
{
	return is_capturing(true, stream, status);
}

/* The number of the row's call. */
static size_t call_of(const char *name)
{
	size_t i = 0;

	while (strcmp(calls[i].name, name))
		i++;
	return i;
}

static void call_row(struct doing *doing)
{
	(void)doing;
	calls[call_of(rows[row_now].name)].call();
}

/* One that names a stream is held by the GPU of that, and not by that of the current context. */
static void each_row(void)
{
	unsigned int held = 0, streamed = 0;
	struct device *second;
	struct driver before;
	CUcontext other;

	DO(cuDevicePrimaryCtxRetain(&other, 1));
	DO(cuCtxSetCurrent(other));
	second = device_current();
	CHECK(second && second != device);
	stream_given = config_given.hStream = stream_new();
	DO(cuCtxSetCurrent(context));
	real.cuStreamIsCapturing = is_capturing_legacy;
	real.cuStreamIsCapturing_ptsz = is_capturing_own;
	before = real;
	for (row_now = 0; row_now < ROWS; row_now++) {
		const char *name = rows[row_now].name;
		const bool of_stream = calls[call_of(name)].streamed, joins = !strncmp(name, "cuStreamWaitEvent", 17);
		struct device *at = of_stream ? second : device;
		const int bit = 1 << is_own(name);
		struct doing doing = { 0 };
		void **pointer = (void **)((char *)&real + rows[row_now].offset);

		/* This one calls nothing of the driver's. */
		if (!strncmp(name, "cuGetProcAddress", 16))
			continue;
		over(at);
		stream_now = of_stream ? stream_given : NULL;
		*pointer = (void *)refuse;
		reached = 0;
		asked = 0;
		/* As if some stream was captured: else the driver is not asked. What may join that passes. */
		__atomic_store_n(&stream_captures, 1, __ATOMIC_SEQ_CST);
		if (joins) {
			EXPECT(CUDA_ERROR_UNKNOWN, calls[call_of(name)].call());
			reached = 0;
			__atomic_store_n(&stream_captures, 0, __ATOMIC_SEQ_CST);
		}
		begin_doing(&doing, call_row);
		if (is_held(&doing, at) != rows[row_now].held) {
			fprintf(stderr, "%s is %sheld\n", name, rows[row_now].held ? "not " : "");
			exit(1);
		}
		CHECK(!rows[row_now].held || !__atomic_load_n(&reached, __ATOMIC_SEQ_CST));
		if (__atomic_load_n(&asked, __ATOMIC_SEQ_CST) & ~bit || (rows[row_now].held && !joins && !asked)) {
			fprintf(stderr, "%s asks in the form of another\n", name);
			exit(1);
		}
		held += rows[row_now].held;
		streamed += rows[row_now].held && of_stream;
		turn_begin(at, 0);
		end_doing(&doing);
		CHECK(!(__atomic_load_n(&asked, __ATOMIC_SEQ_CST) & ~bit));
		CHECK(!rows[row_now].held || __atomic_load_n(&reached, __ATOMIC_SEQ_CST) == 1);
		__atomic_store_n(&stream_captures, 0, __ATOMIC_SEQ_CST);
		*pointer = *(void **)((char *)&before + rows[row_now].offset);
	}
	CHECK(held > 100 && streamed > 60);
}

/* The others */

static void launches_one(struct doing *doing)
{
	launch("counts", doing->stream);
}

static void drain(void)
{
	struct doing doing = { .stream = stream_new() };
	CUstream stream = stream_new();
	CUdeviceptr address;
	uint64_t begun;
	size_t free_bytes, total;
	bool drained;
	CUevent event;

	DO(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	launch("waits", stream);
	DO(cuEventRecord(event, stream));
	begun = microseconds();
	CHECK(!turn_end(device, 30000, &drained) && !drained);
	CHECK(microseconds() - begun >= 30000);
	/* What runs late runs; what is new is held all the same. */
	begin_doing(&doing, launches_one);
	CHECK(is_held(&doing, device));
	EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
	EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(event));
	CHECK(!turn_end(device, 0, &drained) && !drained);
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	until_drained();
	CHECK(!is_done(&doing) && ran == 1);
	/* What asks, waits, allocates and frees goes on. */
	DO(cuStreamQuery(stream));
	DO(cuEventQuery(event));
	DO(cuStreamSynchronize(stream));
	DO(cuEventSynchronize(event));
	DO(cuCtxSynchronize());
	DO(cuMemGetInfo_v2(&free_bytes, &total));
	DO(cuMemAlloc_v2(&address, 4 << 20));
	DO(cuMemFree_v2(address));
	DO(cuMemAllocAsync(&address, 4 << 20, stream));
	DO(cuStreamSynchronize(stream));
	/* So does a move: it closes the other gate. */
	CHECK(gate_close(SOON_US / 1000));
	gate_open();
	CHECK(!is_done(&doing));
	turn_begin(device, 0);
	end_doing(&doing);
	DO(cuMemFreeAsync(address, stream));
	DO(cuCtxSynchronize());
	CHECK(ran == 2);
	/* Again at once: it runs nothing. */
	until_drained();
	turn_begin(device, 0);
}

static void sets_inside(struct doing *doing)
{
	CUdeviceptr address;

	(void)doing;
	DO(cuMemAlloc_v2(&address, 4096));
	gate_enter();
	DO(cuMemsetD8_v2(address, 1, 4096));
	gate_leave();
}

static CUevent event_now;

static void records_event(struct doing *doing)
{
	DO(cuEventRecord(event_now, doing->stream));
}

static void waits_for_event(struct doing *doing)
{
	DO(cuStreamWaitEvent(doing->stream, event_now, 0));
}

static void calls_host(void *unused)
{
	(void)unused;
	__atomic_add_fetch(&ran, 1, __ATOMIC_SEQ_CST);
}

static void launches_host(struct doing *doing)
{
	DO(cuLaunchHostFunc(doing->stream, calls_host, NULL));
}

static void uploads(struct doing *doing)
{
	CUDA_GRAPH_INSTANTIATE_PARAMS how = { .flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD,
					      .hUploadStream = doing->stream };
	CUgraphExec exec;
	CUgraph graph;

	DO(cuGraphCreate(&graph, 0));
	DO(cuGraphInstantiateWithParams(&exec, graph, &how));
	DO(cuGraphExecDestroy(exec));
	DO(cuGraphDestroy(graph));
}

static void records_all(struct doing *doing)
{
	/* The GPU is that of the context that is given. */
	DO(cuCtxSetCurrent(context));
	EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuCtxRecordEvent(doing->context, event_now));
}

/* A program that is drained stays so: the first thing of its next step comes with its next turn. */
static void events(void)
{
	static void (*const what[])(struct doing *) = {
		records_event, waits_for_event, launches_host, uploads, records_all,
	};
	CUstream streams[2];
	CUevent events_of[2];
	CUcontext contexts[2] = { context };
	struct device *devices_of[2] = { device };

	DO(cuDevicePrimaryCtxRetain(&contexts[1], 1));
	for (int i = 0; i < 2; i++) {
		DO(cuCtxSetCurrent(contexts[i]));
		devices_of[i] = device_current();
		streams[i] = stream_new();
		DO(cuEventCreate(&events_of[i], CU_EVENT_DISABLE_TIMING));
		DO(cuEventRecord(events_of[i], streams[i]));
	}
	DO(cuCtxSetCurrent(context));
	for (int i = 0; i < 2; i++)
		for (size_t k = 0; k < sizeof(what) / sizeof(what[0]); k++) {
			struct doing held = { .stream = streams[i], .context = contexts[i] };
			struct doing other = { .stream = streams[!i], .context = contexts[!i] };

			event_now = events_of[i];
			over(devices_of[i]);
			begin_doing(&held, what[k]);
			CHECK(is_held(&held, devices_of[i]));
			/* Nothing of it is pending. */
			over(devices_of[i]);
			EXPECT(CUDA_SUCCESS, cuEventQuery(event_now));
			/* On the other GPU the same goes on. */
			event_now = what[k] == waits_for_event ? events_of[i] : events_of[!i];
			begin_doing(&other, what[k]);
			end_doing(&other);
			event_now = events_of[i];
			turn_begin(devices_of[i], 0);
			end_doing(&held);
		}
	DO(cuCtxSynchronize());
	DO(cuStreamSynchronize(streams[1]));
	CHECK(ran == 4);
}

/* A thread that is inside already could not come outside: it goes on. */
static void nested(void)
{
	struct doing doing = { 0 };

	over(device);
	begin_doing(&doing, sets_inside);
	end_doing(&doing);
	turn_begin(device, 0);
}

static bool copying;		/* atomically: a copy came to the driver */
static __typeof__(&cuMemcpyDtoH_v2) real_copy;

static CUresult copies_out(void *host, CUdeviceptr from, size_t bytes)
{
	__atomic_store_n(&copying, true, __ATOMIC_SEQ_CST);
	return real_copy(host, from, bytes);
}

static void copies(struct doing *doing)
{
	uint64_t word;
	CUdeviceptr address;

	(void)doing;
	DO(cuMemAlloc_v2(&address, 4096));
	DO(cuMemcpyDtoH_v2(&word, address, 8));
}

static void launches_other(struct doing *doing)
{
	for (int i = 0; i < 20; i++)
		launch("counts", doing->stream);
}

static void launches_on_both(struct doing *doing)
{
	CUfunction f = function("counts");
	CUDA_LAUNCH_PARAMS list[2] = {
		{ f, 1, 1, 1, 1, 1, 1, 0, stream_new(), parameters },
		{ f, 1, 1, 1, 1, 1, 1, 0, doing->stream, parameters },
	};
	CUresult result = cuLaunchCooperativeKernelMultiDevice(list, 2, 0);

	CHECK(result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_HANDLE);
}

/* A thread that is inside, in a call that does not return, holds up none on the other GPU. */
static void devices(void)
{
	struct doing stuck = { 0 }, other = { 0 }, held = { 0 };
	struct device *second;
	bool drained;

	DO(cuDevicePrimaryCtxRetain(&other.context, 1));
	DO(cuCtxSetCurrent(other.context));
	second = device_current();
	CHECK(second && second != device);
	other.stream = stream_new();
	DO(cuCtxSetCurrent(context));
	launch("waits", NULL);
	real_copy = real.cuMemcpyDtoH_v2;
	real.cuMemcpyDtoH_v2 = copies_out;
	begin_doing(&stuck, copies);
	/* Else it would be held as `held` is, until the turn begins, which comes after its end. */
	wait_for(&copying);
	CHECK(!turn_end(device, 20000, &drained) && !drained);
	CHECK(!turn_waiting(device));
	begin_doing(&held, launches_one);
	CHECK(is_held(&held, device));
	begin_doing(&other, launches_other);
	end_doing(&other);
	CHECK(!turn_waiting(second));
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	end_doing(&stuck);
	until_drained();
	/* Each by its own. */
	over(second);
	turn_begin(device, 0);
	end_doing(&held);
	other = (struct doing){ .context = other.context, .stream = other.stream };
	begin_doing(&other, launches_one);
	CHECK(is_held(&other, second));
	turn_begin(second, 0);
	end_doing(&other);
	/* A launch on both wants both. */
	over(device);
	over(second);
	other = (struct doing){ .context = context, .stream = other.stream };
	begin_doing(&other, launches_on_both);
	CHECK(is_held(&other, device));
	turn_begin(device, 0);
	CHECK(is_held(&other, second));
	turn_begin(second, 0);
	end_doing(&other);
	DO(cuCtxSynchronize());
}

static void begins(struct doing *doing)
{
	CUgraph graph;

	DO(cuStreamBeginCapture_v2(doing->stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	launch("counts", doing->stream);
	DO(cuStreamEndCapture(doing->stream, &graph));
}

static void sets(struct doing *doing)
{
	DO(cuCtxSetCurrent(context));
	/* The stream of a context that is not current. */
	CHECK(turn_any);
	gate_enter();
	CHECK(turn_hold(TURN_OTHER, doing->stream, false));
	gate_leave();
}

static void captures(void)
{
	struct doing doing = { .stream = stream_new() }, launching = { 0 }, setting = { 0 };
	CUstream stream = stream_new();
	CUcontext second_context;
	struct device *second;
	CUgraph graph;
	bool drained;

	DO(cuDevicePrimaryCtxRetain(&second_context, 1));
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	CHECK(turn_end(device, 1000, &drained) == EBUSY);
	/* It is open. */
	launch("counts", doing.stream);
	DO(cuStreamSynchronize(doing.stream));
	launch("counts", stream);
	DO(cuStreamEndCapture(stream, &graph));
	over(device);
	/* None begins without a turn. */
	begin_doing(&doing, begins);
	CHECK(is_held(&doing, device));
	/* One on another GPU goes on, and takes no part of what is launched here. */
	DO(cuCtxSetCurrent(second_context));
	second = device_current();
	CHECK(second && second != device);
	stream = stream_new();
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	launch("counts", stream);
	DO(cuStreamEndCapture(stream, &graph));
	CHECK(!turn_end(device, 0, &drained));
	turn_begin(device, 0);
	end_doing(&doing);
	CHECK(ran == 1);
	/* The GPU is that of the stream. */
	over(second);
	setting.stream = stream;
	begin_doing(&setting, sets);
	CHECK(is_held(&setting, second));
	DO(cuCtxSetCurrent(context));
	launching.stream = doing.stream;
	begin_doing(&launching, launches_one);
	end_doing(&launching);
	turn_open_all();
	end_doing(&setting);
}

/* A thread of the library that still waits for what was late, when the turn has begun, ends no capture. */
static void stale(void)
{
	CUstream stream = stream_new(), captured;
	CUgraph graph;
	bool drained;

	launch("waits", stream);
	/* Asked again and again, as a drain that lasts is. */
	for (int i = 0; i < 3; i++)
		CHECK(!turn_end(device, 0, &drained) && !drained);
	turn_begin(device, 0);
	captured = stream_new();
	DO(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
	launch("counts", captured);
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	while (!__atomic_load_n(&ran, __ATOMIC_SEQ_CST))
		usleep(200);
	usleep(50000);
	DO(cuStreamEndCapture(captured, &graph));
	until_drained();
}

/* A capture on a GPU whose gate is open takes in a stream of one whose gate is closed: that is late meanwhile. */
static void joins(void)
{
	CUstream stream = stream_new(), origin;
	CUcontext second;
	CUgraph graph;
	CUevent event;
	bool drained;

	DO(cuDevicePrimaryCtxRetain(&second, 1));
	until_drained();
	DO(cuCtxSetCurrent(second));
	origin = stream_new();
	DO(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	DO(cuStreamBeginCapture_v2(origin, CU_STREAM_CAPTURE_MODE_RELAXED));
	DO(cuEventRecord(event, origin));
	DO(cuCtxSetCurrent(context));
	DO(cuStreamWaitEvent(stream, event, 0));
	launch("counts", stream);
	CHECK(!turn_end(device, 0, &drained) && !drained);
	DO(cuCtxSetCurrent(second));
	DO(cuStreamEndCapture(origin, &graph));
	DO(cuCtxSetCurrent(context));
	until_drained();
	CHECK(!ran);
}

/* What keeps a program from being drained */

static uint64_t synchronized;	/* atomically */
static bool failing;		/* atomically */
static __typeof__(&cuCtxSynchronize) real_synchronize;

static CUcontext visited[2];	/* atomically: that a thread waits for, while such are destroyed */
static bool destroying;		/* atomically */

static CUresult visits(void)
{
	static int last;	/* atomically */
	static __thread int number;
	CUcontext current = NULL;
	CUresult result;

	if (!number)
		number = __atomic_add_fetch(&last, 1, __ATOMIC_SEQ_CST);
	CHECK(number <= 2);
	DO(real.cuCtxGetCurrent(&current));
	__atomic_store_n(&visited[number - 1], current, __ATOMIC_SEQ_CST);
	usleep(300);
	result = real_synchronize();
	__atomic_store_n(&visited[number - 1], NULL, __ATOMIC_SEQ_CST);
	return result;
}

static CUresult synchronizes(void)
{
	if (__atomic_load_n(&destroying, __ATOMIC_SEQ_CST))
		return visits();
	__atomic_add_fetch(&synchronized, 1, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&failing, __ATOMIC_SEQ_CST) ? CUDA_ERROR_UNKNOWN : real_synchronize();
}

/* What is counted and runs is not waited for in the driver, where a thread would spin until it ends. */
static void late(void)
{
	const uint64_t before = __atomic_load_n(&synchronized, __ATOMIC_SEQ_CST);
	CUstream streams[2] = { stream_new(), stream_new() };
	bool drained;

	CHECK(counters_wake);
	launch("waits", streams[0]);
	launch("counts", streams[1]);
	launch("counts", streams[1]);
	for (int i = 0; i < 3; i++)
		CHECK(!turn_end(device, 10000, &drained) && !drained && turn_is_late(device));
	usleep(10000);
	CHECK(__atomic_load_n(&synchronized, __ATOMIC_SEQ_CST) == before);
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	until_drained();
	CHECK(ran == 3 && !turn_is_late(device));
	CHECK(__atomic_load_n(&synchronized, __ATOMIC_SEQ_CST) > before);
	turn_begin(device, 0);
	CHECK(!turn_is_late(device));
}

/* An answer of "late" takes the time that was given; where it would be the only one there is none. */
static void never(void)
{
	uint64_t begun = microseconds();
	bool drained;

	__atomic_store_n(&failing, true, __ATOMIC_SEQ_CST);
	CHECK(!turn_end(device, 30000, &drained) && !drained);
	CHECK(microseconds() - begun >= 30000);
	CHECK(turn_any);
	device->elastic = false;
	CHECK(turn_end(device, 30000, &drained) == EOPNOTSUPP && !drained);
	CHECK(!turn_any);
	CHECK(turn_end(device, 30000, &drained) == EOPNOTSUPP && !drained);
	CHECK(!turn_any);
	device->elastic = true;
	__atomic_store_n(&failing, false, __ATOMIC_SEQ_CST);
	until_drained();
}

static __typeof__(&cuCtxDestroy_v2) real_destroy;

static CUresult destroys_it(CUcontext ended)
{
	for (int i = 0; i < 2; i++)
		CHECK(__atomic_load_n(&visited[i], __ATOMIC_SEQ_CST) != ended);
	return real_destroy(ended);
}

static bool was_drained;	/* atomically: once, while contexts come and go */

static void comes_and_goes(struct doing *doing)
{
	const uint64_t until = microseconds() + LONG_US;
	CUcontext own;

	for (int i = 0; i < ROUNDS || !__atomic_load_n(&was_drained, __ATOMIC_SEQ_CST); i++) {
		CHECK(i < ROUNDS || microseconds() < until);
		DO(cuCtxCreate_v2(&own, 0, 0));
		/* Long enough to be waited for. */
		usleep(i % 4 * 200);
		DO(cuCtxDestroy_v2(own));
		/* This stays: it is retained by others. */
		DO(cuDevicePrimaryCtxRetain(&own, 0));
		CHECK(own == doing->context);
		DO(cuDevicePrimaryCtxRelease_v2(0));
	}
}

static void frees_at_once(struct doing *doing)
{
	CUdeviceptr address;

	(void)doing;
	while (!__atomic_load_n(&release, __ATOMIC_ACQUIRE)) {
		DO(cuMemAlloc_v2(&address, 4 << 20));
		DO(cuMemFree_v2(address));
	}
}

/* What a drain, and a free, wait for is not destroyed meanwhile, and what is destroyed is not waited for. */
static void contexts_go(void)
{
	struct doing going = { 0 }, freeing = { 0 };
	bool drained;

	real_destroy = real.cuCtxDestroy_v2;
	real.cuCtxDestroy_v2 = destroys_it;
	__atomic_store_n(&destroying, true, __ATOMIC_SEQ_CST);
	begin_doing(&going, comes_and_goes);
	begin_doing(&freeing, frees_at_once);
	while (!is_done(&going)) {
		CHECK(!turn_end(device, 5000, &drained));
		if (drained)
			__atomic_store_n(&was_drained, true, __ATOMIC_SEQ_CST);
		turn_begin(device, 0);
	}
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	end_doing(&going);
	end_doing(&freeing);
	until_drained();
}

/* Markers */

static uint64_t recorded;	/* atomically: events, by the program and by the library */
static __typeof__(&cuEventRecord) real_record;

static CUresult records(CUevent event, CUstream stream)
{
	__atomic_add_fetch(&recorded, 1, __ATOMIC_SEQ_CST);
	return real_record(event, stream);
}

static CUdeviceptr to_free;

static void frees(struct doing *doing)
{
	DO(cuMemFreeAsync(to_free, doing->stream));
}

static void destroys(struct doing *doing)
{
	DO(cuStreamDestroy_v2(doing->stream));
}

static void rests(struct doing *doing)
{
	(void)doing;
}

/* Short work has no marker behind it as the turn ends, and gets none until the next, whatever is done meanwhile. */
static void ends_after_a_launch(CUstream stream, struct doing *doing, void (*what)(struct doing *), bool held)
{
	uint64_t before;

	/* Behind the first there is one. */
	for (int i = 0; i < AT_ONCE; i++)
		launch("counts", stream);
	over(device);
	before = __atomic_load_n(&recorded, __ATOMIC_SEQ_CST);
	begin_doing(doing, what);
	CHECK(is_held(doing, device) == held);
	/* The listening thread looks 2 ms after the launch. */
	usleep(20000);
	CHECK(__atomic_load_n(&recorded, __ATOMIC_SEQ_CST) == before);
	turn_begin(device, 0);
	end_doing(doing);
}

/* On a GPU that runs nothing of the program an event stays pending, and what waits for the context waits for it. */
static void marks(void)
{
	CUstream stream = stream_new(), gone = stream_new();
	struct doing resting = { 0 }, destroying = { .stream = gone }, capturing = { 0 },
		     freeing = { .stream = stream };
	uint64_t submitted, finished;

	CHECK(counters_wake);
	DO(cuMemAllocAsync(&to_free, 4 << 20, stream));
	DO(cuDevicePrimaryCtxRetain(&capturing.context, 1));
	DO(cuCtxSetCurrent(capturing.context));
	capturing.stream = stream_new();
	DO(cuCtxSetCurrent(context));
	ends_after_a_launch(stream, &resting, rests, false);
	totals_get(device, &submitted, &finished);
	CHECK(submitted == AT_ONCE && finished == AT_ONCE);
	ends_after_a_launch(gone, &destroying, destroys, false);
	/* Before one begins, on whichever GPU, the streams of all get a marker. */
	ends_after_a_launch(stream, &capturing, begins, false);
	ends_after_a_launch(stream, &freeing, frees, true);
	DO(cuCtxSynchronize());
	CHECK(ran == 4 * AT_ONCE);
}

/* Hammering */

static bool shut, stop;		/* atomically */
static uint64_t launched;	/* atomically */
static __typeof__(&cuLaunchKernel) real_launch;

static CUresult spy(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
		    unsigned int bz, unsigned int shared, CUstream stream, void **values, void **extra)
{
	CUresult result;

	CHECK(!__atomic_load_n(&shut, __ATOMIC_SEQ_CST));
	result = real_launch(f, gx, gy, gz, bx, by, bz, shared, stream, values, extra);
	CHECK(!__atomic_load_n(&shut, __ATOMIC_SEQ_CST));
	__atomic_add_fetch(&launched, 1, __ATOMIC_RELAXED);
	return result;
}

static void hammers(struct doing *doing)
{
	CUstream stream = stream_new();
	CUfunction f = function("counts");
	CUdeviceptr address;

	(void)doing;
	DO(cuMemAlloc_v2(&address, 4096));
	for (int i = 0; !__atomic_load_n(&stop, __ATOMIC_ACQUIRE); i++) {
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
		if (i % 16 == 0)
			DO(cuMemsetD8Async(address, 1, 4096, stream));
		if (i % 64 == 0)
			DO(cuStreamSynchronize(stream));
	}
	DO(cuStreamSynchronize(stream));
	DO(cuMemFree_v2(address));
}

static void hammer(void)
{
	struct doing doings[THREADS] = { 0 };
	unsigned int drained_times = 0;
	uint64_t before, ran_before;
	bool drained;

	real_launch = real.cuLaunchKernel;
	real.cuLaunchKernel = spy;
	for (int i = 0; i < THREADS; i++)
		begin_doing(&doings[i], hammers);
	for (int round = 0; round < ROUNDS; round++) {
		CHECK(!turn_end(device, 10 * SOON_US, &drained));
		if (drained) {
			drained_times++;
			__atomic_store_n(&shut, true, __ATOMIC_SEQ_CST);
			before = __atomic_load_n(&launched, __ATOMIC_SEQ_CST);
			ran_before = __atomic_load_n(&ran, __ATOMIC_SEQ_CST);
			usleep(100);
			CHECK(before == __atomic_load_n(&launched, __ATOMIC_SEQ_CST));
			CHECK(ran_before == __atomic_load_n(&ran, __ATOMIC_SEQ_CST));
			__atomic_store_n(&shut, false, __ATOMIC_SEQ_CST);
		}
		/* A move in between, as the mover's. */
		if (round % 8 == 0) {
			CHECK(gate_close(SOON_US / 1000));
			gate_open();
		}
		if (round % 5 == 0)
			turn_open_all();
		else
			turn_begin(device, round % 3 ? 0 : 500);
		usleep(200);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELEASE);
	turn_open_all();
	for (int i = 0; i < THREADS; i++)
		end_doing(&doings[i]);
	CHECK(drained_times > ROUNDS / 2 && launched > ROUNDS);
	CHECK(ran == launched);
}

static void in_fork(void)
{
	struct doing doing = { .stream = stream_new() };
	pid_t child;
	int status;

	over(device);
	begin_doing(&doing, launches_one);
	CHECK(is_held(&doing, device));
	child = fork();
	if (!child) {
		/* Open: no daemon would open it. The double of the driver does not work here, nor does CUDA. */
		CHECK(!turn_any && !turn_waiting(device));
		turn_enter(TURN_KERNELS, NULL, false);
		gate_leave();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	CHECK(!is_done(&doing));
	turn_begin(device, 0);
	end_doing(&doing);
}

static void is_cancelled(struct doing *doing)
{
	launch("counts", doing->stream);
	pthread_testcancel();
	CHECK(!"it is gone");
}

/* A thread that is to end while it waits does so after it, and holds nothing then. */
static void cancelled(void)
{
	struct doing doing = { .stream = stream_new() };
	bool drained;

	for (int i = 0; i < 20; i++) {
		over(device);
		begin_doing(&doing, is_cancelled);
		CHECK(is_held(&doing, device));
		CHECK(!pthread_cancel(doing.thread));
		usleep(1000);
		CHECK(!turn_end(device, 0, &drained));
		turn_begin(device, 0);
		pthread_join(doing.thread, NULL);
		CHECK(!is_done(&doing) && !turn_waiting(device));
	}
	over(device);
	turn_begin(device, 0);
}

static CUfunction to_launch;

static void launches_in_callback(void *stream)
{
	DO(cuCtxSetCurrent(context));
	DO(cuLaunchKernel(to_launch, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

/* A drain waits for the function, and that for its turn: it is late, and no more. */
static void callback(void)
{
	CUstream stream = stream_new(), other = stream_new();
	uint64_t begun = microseconds();
	bool drained;

	to_launch = function("counts");
	launch("waits", stream);
	DO(cuLaunchHostFunc(stream, launches_in_callback, other));
	CHECK(!turn_end(device, 0, &drained) && !drained);
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	while (!turn_waiting(device)) {
		CHECK(microseconds() - begun < LONG_US);
		usleep(200);
	}
	CHECK(!turn_end(device, 20000, &drained) && !drained);
	turn_begin(device, 0);
	DO(cuCtxSynchronize());
	until_drained();
	CHECK(ran == 2);
}

/* Run-ahead */

static void ahead(void)
{
	CUstream stream = stream_new();
	CUfunction f = function("counts");
	uint64_t most = 0, begun, us = (uint64_t)atoi(getenv("FAKE_KERNEL_US"));
	CUdeviceptr address;

	DO(cuMemAlloc_v2(&address, 4096));
	turn_begin(device, us * 8);
	begun = microseconds();
	for (uint64_t i = 1; i <= 60; i++) {
		uint64_t pending;

		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
		DO(cuMemsetD8Async(address, 1, 8, stream));	/* not bounded */
		pending = i - __atomic_load_n(&ran, __ATOMIC_SEQ_CST);
		most = pending > most ? pending : most;
	}
	/* It was held most of the time. */
	CHECK(microseconds() - begun >= us * 30);
	DO(cuStreamSynchronize(stream));
	printf("most %llu took %llu\n", (unsigned long long)most, (unsigned long long)(microseconds() - begun));
	/* With none, or at the end of all turns, it is as far ahead as it likes. */
	turn_open_all();
	launch("waits", stream);
	begun = microseconds();
	for (int i = 0; i < 100; i++)
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	CHECK(!turn_any);
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	DO(cuStreamSynchronize(stream));
	CHECK(ran == 161);
}

/* What is launched at once, to the bound, is heard of in parts: else nothing would be left once it is known that more
 * may be launched. */
static void fed(void)
{
	CUstream stream = stream_new();
	CUfunction f = function("counts");
	uint64_t submitted, before, finished, us = (uint64_t)atoi(getenv("FAKE_KERNEL_US")), longest = 0;

	turn_begin(device, us * 16);
	for (int i = 0; i < 3 * 16; i++)
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	DO(cuStreamSynchronize(stream));
	until_drained();
	turn_begin(device, us * 16);
	totals_get(device, &submitted, &before);
	for (int i = 0; i < 3 * 16; i++) {
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
		totals_get(device, &submitted, &finished);
		longest = finished - before > longest ? finished - before : longest;
		before = finished;
	}
	printf("most %llu\n", (unsigned long long)longest);
	DO(cuStreamSynchronize(stream));
}

static int by_length(const void *one, const void *other)
{
	const uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return a < b ? -1 : a > b;
}

/* What runs when a turn is over is looked at often: the daemon goes by what is pending. */
static void looks_at_rest(void)
{
	CUstream stream = stream_new();
	uint64_t late[15], submitted, finished;
	bool drained;

	for (unsigned int i = 0; i < 15; i++) {
		uint64_t begun;

		__atomic_store_n(&release, false, __ATOMIC_SEQ_CST);
		turn_begin(device, 0);
		launch("waits", stream);
		CHECK(!turn_end(device, 2000, &drained) && !drained);
		usleep(28000 + i * 1000);
		__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
		begun = microseconds();
		do {
			usleep(50);
			totals_get(device, &submitted, &finished);
		} while (submitted > finished);
		late[i] = microseconds() - begun;
		until_drained();
	}
	qsort(late, 15, sizeof(late[0]), by_length);
	printf("median %llu\n", (unsigned long long)late[7]);
}

static int64_t most_pending;	/* atomically */
static int launches = 12;	/* of a thread */

/* Launches as fast as it is let; how many are pending then. */
static void launches_ahead(struct doing *doing)
{
	CUfunction f = function("counts");

	for (int i = 0; i < launches; i++) {
		int64_t pending, most = __atomic_load_n(&most_pending, __ATOMIC_SEQ_CST);

		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, doing->stream, parameters, NULL));
		pending = (int64_t)(__atomic_add_fetch(&launched, 1, __ATOMIC_SEQ_CST) -
				    __atomic_load_n(&ran, __ATOMIC_SEQ_CST));
		while (pending > most && !__atomic_compare_exchange_n(&most_pending, &most, pending, false,
								      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
			;
	}
}

static void tell_most(void)
{
	DO(cuCtxSynchronize());
	printf("most %lld\n", (long long)most_pending);
}

/* A kernel takes much longer than the bound: a thread has one, and each waits for it. */
static void longer(void)
{
	struct doing doings[THREADS] = { 0 };

	turn_begin(device, (uint64_t)atoi(getenv("FAKE_KERNEL_US")) / 8);
	for (int i = 0; i < THREADS; i++) {
		doings[i].stream = stream_new();
		begin_doing(&doings[i], launches_ahead);
	}
	for (int i = 0; i < THREADS; i++)
		end_doing(&doings[i]);
	tell_most();
}

/* What the CPU does meanwhile is no time of a kernel. */
static void idle(void)
{
	struct doing doing = { .stream = stream_new() };

	turn_begin(device, (uint64_t)atoi(getenv("FAKE_KERNEL_US")) * 8);
	launches_ahead(&doing);
	DO(cuCtxSynchronize());
	launch("counts", doing.stream);
	usleep(2000000);
	launched = __atomic_load_n(&ran, __ATOMIC_SEQ_CST);
	most_pending = 0;
	launches = 4;
	launches_ahead(&doing);
	tell_most();
}

/* Nor is the time for which the engine is another program's. */
static void preempted(void)
{
	struct doing doing = { .stream = stream_new() };
	const int kernel_us = atoi(getenv("FAKE_KERNEL_US"));

	turn_begin(device, (uint64_t)kernel_us * 8);
	launches_ahead(&doing);
	DO(cuCtxSynchronize());
	launch("waits", doing.stream);
	usleep((useconds_t)kernel_us * 20);
	__atomic_store_n(&release, true, __ATOMIC_RELEASE);
	DO(cuCtxSynchronize());
	launched = __atomic_load_n(&ran, __ATOMIC_SEQ_CST);
	most_pending = 0;
	launches = 4;
	launches_ahead(&doing);
	tell_most();
}

static __thread bool watched;
static bool stand_still;	/* atomically */
static uint64_t looked;		/* atomically */
static __typeof__(&cuEventQuery) real_query;

static CUresult queries(CUevent event)
{
	CHECK(!watched || !__atomic_load_n(&stand_still, __ATOMIC_SEQ_CST));
	__atomic_add_fetch(&looked, watched, __ATOMIC_SEQ_CST);
	return real_query(event);
}

static void launches_watched(struct doing *doing)
{
	watched = true;
	launch("counts", doing->stream);
}

/* While a program stands by, to be checkpointed, a thread that is too far ahead does not look what has finished. */
static void stands(void)
{
	struct doing doing = { .stream = stream_new() };

	turn_begin(device, 1000000);
	launch("waits", doing.stream);
	begin_doing(&doing, launches_watched);
	CHECK(is_held(&doing, device));
	CHECK(gate_close(SOON_US / 1000));
	CHECK(gate_stand(SOON_US / 1000));
	CHECK(__atomic_load_n(&looked, __ATOMIC_SEQ_CST));
	__atomic_store_n(&stand_still, true, __ATOMIC_SEQ_CST);
	usleep(50000);
	__atomic_store_n(&stand_still, false, __ATOMIC_SEQ_CST);
	gate_go_on();
	gate_open();
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	end_doing(&doing);
	DO(cuCtxSynchronize());
	CHECK(ran == 2);
}

KERNEL(releases, sizeof(int))
{
	(void)parameters;
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
}

/* A kernel that waits for others of its program: they come, however many are launched before. */
static void dependent(void)
{
	CUstream first = stream_new(), second = stream_new();
	uint64_t begun;

	turn_begin(device, 1000000);
	launch("waits", first);
	begun = microseconds();
	for (int i = 0; i < 50; i++)
		launch("counts", first);
	launch("releases", second);
	/* A second, half of one, a quarter: not 50 of them. */
	CHECK(microseconds() - begun < 20000000);
	DO(cuCtxSynchronize());
	CHECK(ran == 51);
	/* A capture is not held by it. */
	release = false;
	launch("waits", first);
	begins(&(struct doing){ .stream = second });
	__atomic_store_n(&release, true, __ATOMIC_SEQ_CST);
	DO(cuCtxSynchronize());
}

/* What it costs to enter and leave while all are open, in picoseconds. */
static void cost(void)
{
	uint64_t begun = microseconds();

	for (int i = 0; i < 10000000; i++) {
		turn_enter(TURN_KERNELS, NULL, false);
		gate_leave();
	}
	printf("%llu\n", (unsigned long long)(microseconds() - begun) / 10);
}

static const struct {
	const char *name;
	void (*test)(void);
} cases[] = {
	{ "rows", each_row }, { "drain", drain }, { "events", events }, { "nested", nested }, { "devices", devices },
	{ "captures", captures }, { "stale", stale }, { "joins", joins }, { "late", late }, { "never", never },
	{ "marks", marks }, { "hammer", hammer }, { "fork", in_fork }, { "cancelled", cancelled },
	{ "callback", callback }, { "ahead", ahead }, { "fed", fed }, { "rest", looks_at_rest },
	{ "longer", longer }, { "idle", idle }, { "preempted", preempted }, { "stands", stands },
	{ "destroys", contexts_go }, { "dependent", dependent }, { "cost", cost },
};

int main(int argc, char **argv)
{
	(void)argc;
	context = start(0);
	library_begin();
	/* Before there is a thread that calls it. */
	real_record = real.cuEventRecord;
	real.cuEventRecord = records;
	real_synchronize = real.cuCtxSynchronize;
	real.cuCtxSynchronize = synchronizes;
	real_query = real.cuEventQuery;
	real.cuEventQuery = queries;
	device = device_current();
	CHECK(device);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (!strcmp(cases[i].name, argv[1]))
			return cases[i].test(), 0;
	return 2;
}
