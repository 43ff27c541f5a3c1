/* SPDX-License-Identifier: Apache-2.0 */
/* LINK_LIBRARY: sms_all CASE [SEED STEPS]: kernels on some SMs alone, from the inside; the library is part of this
 * program. */
#include <errno.h>
#include <sys/wait.h>

#include "common.h"
#include "counters.h"
#include "detour.h"
#include "device.h"
#include "driver.h"
#include "library.h"
#include "totals.h"

#define FIRST_HALF UINT64_C(0x00ff)
#define SECOND_HALF UINT64_C(0xff00)
#define ONE_GROUP UINT64_C(0x0010)
#define GROUPS 16

extern uint64_t fake_groups(void);

static CUcontext context;
static struct device *device;
static uint64_t seen;		/* atomically: groups of the last kernel */
static uint64_t runs;		/* atomically: kernels that ran */

KERNEL(looks, sizeof(int))
{
	(void)parameters;
	__atomic_store_n(&seen, fake_groups(), __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&runs, 1, __ATOMIC_SEQ_CST);
}

static int zero;
static void *nothing[] = { &zero };

/* As the program does, whose driver is behind the wrappers. */
static void begin(void)
{
	context = start(0);
	library_begin();
	device = device_current();
	CHECK(device);
}

static void launch(CUstream stream)
{
	DO(cuLaunchKernel(function("looks"), 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
}

/* Groups on which a kernel in `stream` runs. */
static uint64_t where(CUstream stream)
{
	__atomic_store_n(&seen, UINT64_MAX, __ATOMIC_SEQ_CST);
	launch(stream);
	DO(cuStreamSynchronize(stream));
	return __atomic_load_n(&seen, __ATOMIC_SEQ_CST);
}

static CUstream stream_new(unsigned int flags)
{
	CUstream stream;

	DO(cuStreamCreate(&stream, flags));
	return stream;
}

/* Launches that ran on all SMs though there was a limit; those that ran where they should. */
static uint64_t unplaced, placed;

static struct totals_page page;

static void counts_since(uint64_t *before_unplaced)
{
	unplaced = page.gpu[0].unplaced - *before_unplaced;
	placed = page.gpu[0].placed;
	*before_unplaced = page.gpu[0].unplaced;
}

static void count_on_page(void)
{
	__atomic_store_n(&device->index, 0, __ATOMIC_SEQ_CST);
	totals_share(&page);
}

/* Each kind of stream, with limits that come, change and go. */
static void placed_everywhere(void)
{
	CUstream streams[5];
	const uint64_t masks[] = { FIRST_HALF, ONE_GROUP, 0, SECOND_HALF, FIRST_HALF, 0 };

	begin();
	count_on_page();
	streams[0] = NULL;
	streams[1] = CU_STREAM_LEGACY;
	streams[2] = CU_STREAM_PER_THREAD;
	streams[3] = stream_new(CU_STREAM_DEFAULT);
	streams[4] = stream_new(CU_STREAM_NON_BLOCKING);
	for (size_t i = 0; i < 5; i++)
		CHECK(where(streams[i]) == 0);
	for (size_t m = 0; m < sizeof(masks) / sizeof(masks[0]); m++) {
		CUcontext current;

		CHECK(!detour_limit(device, masks[m]));
		for (size_t i = 0; i < 5; i++) {
			CHECK(where(streams[i]) == masks[m]);
			DO(cuCtxGetCurrent(&current));
			CHECK(current == context);
			DO(cuStreamGetCtx(streams[i], &current));
			CHECK(current == context);
		}
	}
	CHECK(!detour_on() && page.gpu[0].unplaced == 0 && page.gpu[0].placed == 20);
	/* What the program destroys takes the library's along, and a new one is found out anew. */
	CHECK(!detour_limit(device, ONE_GROUP));
	launch(streams[3]);
	DO(cuStreamDestroy_v2(streams[3]));
	streams[3] = stream_new(CU_STREAM_NON_BLOCKING);
	CHECK(where(streams[3]) == ONE_GROUP);
	/* cuLaunchKernelEx, whose configuration stays the program's. */
	CUlaunchConfig config = { .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1,
				  .blockDimZ = 1, .hStream = streams[4] };
	DO(cuLaunchKernelEx(&config, function("looks"), nothing, NULL));
	DO(cuStreamSynchronize(streams[4]));
	CHECK(config.hStream == streams[4] && seen == ONE_GROUP);
}

static void refused(void)
{
	begin();
	CHECK(detour_limit(device, UINT64_C(1) << GROUPS) == EINVAL);
	CHECK(where(NULL) == 0 && !detour_on());
}

static void without_green(void)
{
	begin();
	CHECK(detour_limit(device, ONE_GROUP) == EOPNOTSUPP);
	CHECK(where(NULL) == 0 && !detour_on());
}

/* What cannot go there runs on all SMs, in order, and is counted. */
static void wide(void)
{
	CUlaunchAttribute attribute = { .id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = { 16, 1, 1 } };
	CUlaunchConfig config = { .gridDimX = 16, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 1, .blockDimY = 1,
				  .blockDimZ = 1, .attrs = &attribute, .numAttrs = 1 };
	CUcontext other;
	CUstream stream, theirs, blocking;
	CUfunction looks;
	CUgraph graph;
	CUgraphExec exec;
	uint64_t before = 0;

	begin();
	count_on_page();
	looks = function("looks");
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	CHECK(!detour_limit(device, FIRST_HALF));
	/* 64 SMs with a block on each. */
	DO(cuLaunchCooperativeKernel(looks, 64, 1, 1, 1, 1, 1, 0, stream, nothing));
	DO(cuStreamSynchronize(stream));
	counts_since(&before);
	CHECK(seen == FIRST_HALF && unplaced == 0);
	DO(cuLaunchCooperativeKernel(looks, 65, 1, 1, 1, 1, 1, 0, stream, nothing));
	DO(cuStreamSynchronize(stream));
	counts_since(&before);
	CHECK(seen == 0 && unplaced == 1);
	/* As without a limit: more than the GPU has. */
	EXPECT(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
	       cuLaunchCooperativeKernel(looks, 133, 1, 1, 1, 1, 1, 0, stream, nothing));
	counts_since(&before);
	config.hStream = stream;
	DO(cuLaunchKernelEx(&config, looks, nothing, NULL));
	DO(cuStreamSynchronize(stream));
	counts_since(&before);
	CHECK(seen == 0 && unplaced == 1);
	attribute.value.clusterDim.x = 4;
	DO(cuLaunchKernelEx(&config, looks, nothing, NULL));
	DO(cuStreamSynchronize(stream));
	counts_since(&before);
	CHECK(seen == FIRST_HALF && unplaced == 0);
	attribute = (CUlaunchAttribute){ .id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1 };
	config.gridDimX = 100;
	DO(cuLaunchKernelEx(&config, looks, nothing, NULL));
	DO(cuStreamSynchronize(stream));
	counts_since(&before);
	CHECK(seen == 0 && unplaced == 1);
	/* While a stream is captured the legacy stream is used by no call of the library. */
	theirs = stream_new(CU_STREAM_NON_BLOCKING);
	launch(NULL);
	launch(stream);
	DO(cuStreamBeginCapture_v2(theirs, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch(theirs);
	launch(NULL);
	launch(stream);
	DO(cuStreamEndCapture(theirs, &graph));
	DO(cuCtxSynchronize());
	counts_since(&before);
	CHECK(unplaced == 1);
	/* ... nor where that would be refused, as a stream that waits for it is captured: it is home by then. */
	blocking = stream_new(CU_STREAM_DEFAULT);
	DO(cuStreamDestroy_v2(theirs));
	theirs = stream_new(CU_STREAM_DEFAULT);
	launch(NULL);
	DO(cuStreamBeginCapture_v2(theirs, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch(blocking);
	launch(theirs);
	DO(cuGraphDestroy(graph));
	DO(cuStreamEndCapture(theirs, &graph));
	DO(cuCtxSynchronize());
	counts_since(&before);
	CHECK(unplaced == 0);
	DO(cuGraphInstantiateWithFlags(&exec, graph, 0));
	DO(cuGraphLaunch(exec, stream));
	DO(cuStreamSynchronize(stream));
	counts_since(&before);
	CHECK(seen == 0 && unplaced == 1);
	DO(cuGraphExecDestroy(exec));
	/* A context of the program's own shares no code with a green one. */
	DO(cuCtxCreate_v2(&other, 0, 0));
	CHECK(where(NULL) == 0);
	counts_since(&before);
	CHECK(unplaced == 1);
	DO(cuCtxDestroy(other));
	CHECK(where(stream) == FIRST_HALF);
}

/* What the driver refuses there is launched as it was asked for. */
static void refused_there(void)
{
	CUstream stream;
	uint64_t before = 0;

	begin();
	count_on_page();
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	CHECK(!detour_limit(device, FIRST_HALF));
	CHECK(where(stream) == FIRST_HALF);
	/* FAKE_FAIL has the second launch fail: the first try of this one. */
	CHECK(where(stream) == 0);
	counts_since(&before);
	CHECK(unplaced == 1 && where(stream) == FIRST_HALF);
}

/* A primary context that the program releases goes, and comes back under a limit. */
static void ends(void)
{
	CUcontext before;
	CUstream stream;
	unsigned int flags;
	int active;

	begin();
	stream = stream_new(CU_STREAM_DEFAULT);
	CHECK(!detour_limit(device, FIRST_HALF));
	CHECK(where(stream) == FIRST_HALF && where(NULL) == FIRST_HALF && where(CU_STREAM_PER_THREAD) == FIRST_HALF);
	/* A release that is not the last one. */
	DO(cuDevicePrimaryCtxRetain(&before, 0));
	launch(stream);
	DO(cuDevicePrimaryCtxRelease(0));
	CHECK(where(stream) == FIRST_HALF);
	launch(stream);
	launch(NULL);
	DO(cuDevicePrimaryCtxRelease(0));
	DO(cuDevicePrimaryCtxGetState(0, &flags, &active));
	CHECK(!active);
	CHECK(__atomic_load_n(&runs, __ATOMIC_SEQ_CST) == 7);
	DO(cuDevicePrimaryCtxRetain(&context, 0));
	DO(cuCtxSetCurrent(context));
	stream = stream_new(CU_STREAM_DEFAULT);
	CHECK(where(stream) == FIRST_HALF && where(NULL) == FIRST_HALF && where(CU_STREAM_PER_THREAD) == FIRST_HALF);
	launch(stream);
	DO(cuDevicePrimaryCtxReset(0));
	DO(cuDevicePrimaryCtxGetState(0, &flags, &active));
	CHECK(!active);
}

static void *launch_alone(void *unused)
{
	(void)unused;
	DO(cuCtxSetCurrent(context));
	CHECK(where(CU_STREAM_PER_THREAD) == FIRST_HALF);
	return NULL;
}

/* What a thread had in a context that is gone serves no other stream. */
static void gone(void)
{
	pthread_t thread;

	begin();
	CHECK(!detour_limit(device, FIRST_HALF));
	CHECK(!pthread_create(&thread, NULL, launch_alone, NULL));
	CHECK(!pthread_join(thread, NULL));
	DO(cuDevicePrimaryCtxRelease(0));
	DO(cuDevicePrimaryCtxRetain(&context, 0));
	DO(cuCtxSetCurrent(context));
	for (int i = 0; i < 4; i++)
		CHECK(where(stream_new(CU_STREAM_NON_BLOCKING)) == FIRST_HALF);
}

/* A child has no driver, and no limit. */
static void forks(void)
{
	pid_t child;
	int status;

	begin();
	CHECK(!detour_limit(device, FIRST_HALF));
	CHECK(where(NULL) == FIRST_HALF);
	child = fork();
	if (!child)
		_exit(detour_on() ? 1 : 0);
	CHECK(waitpid(child, &status, 0) == child && !status);
	CHECK(where(NULL) == FIRST_HALF);
}

/* Launches alone, for what they call. */
static void plain(void)
{
	CUstream stream;
	CUfunction looks;

	begin();
	looks = function("looks");
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	for (int i = 0; i < 100; i++)
		DO(cuLaunchKernel(looks, 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	DO(cuStreamSynchronize(stream));
}

/* The same behind a limit that was set and lifted. */
static void lifted(void)
{
	CUstream stream;
	CUfunction looks;

	begin();
	looks = function("looks");
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	CHECK(!detour_limit(device, FIRST_HALF));
	DO(cuLaunchKernel(looks, 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	CHECK(!detour_limit(device, 0) && !detour_on());
	for (int i = 0; i < 99; i++)
		DO(cuLaunchKernel(looks, 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	DO(cuStreamSynchronize(stream));
}

/* ... and under one: kernels one after another are joined once. */
static void away(void)
{
	CUstream stream;
	CUfunction looks;

	begin();
	looks = function("looks");
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	CHECK(!detour_limit(device, FIRST_HALF));
	for (int i = 0; i < 100; i++)
		DO(cuLaunchKernel(looks, 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	DO(cuStreamSynchronize(stream));
}

/*
 * The model: what each piece of work has to come behind, by the rules of CUDA's streams and events. Each thread has a
 * model of its own, of its own work alone. Its streams are its own, and the legacy stream belongs to the first; or all
 * threads have the same streams.
 */

#define STREAMS 8
#define EVENTS 4
#define BEFORE 64
#define MOST 20000

struct piece {
	uint32_t before[BEFORE];	/* numbers of pieces */
	uint32_t count;
	uint64_t groups;		/* that it is to run on; UINT64_MAX: any of the limits */
	bool ran;			/* atomically */
};

static struct piece pieces[MOST];	/* 0 is none */
static uint32_t next_piece = 1;		/* atomically */
static uint64_t wrong;			/* atomically: pieces that ran before one that they come behind, or elsewhere */

static void run_piece(uint32_t number, bool kernel)
{
	struct piece *piece = &pieces[number];
	const uint64_t groups = fake_groups();

	for (uint32_t i = 0; i < piece->count; i++)
		if (!__atomic_load_n(&pieces[piece->before[i]].ran, __ATOMIC_ACQUIRE)) {
			fprintf(stderr, "piece %u ran before %u\n", number, piece->before[i]);
			__atomic_add_fetch(&wrong, 1, __ATOMIC_SEQ_CST);
		}
	if (kernel && (piece->groups == UINT64_MAX ? groups && groups != FIRST_HALF && groups != SECOND_HALF :
						     groups != piece->groups)) {
		fprintf(stderr, "piece %u ran on %#llx\n", number, (unsigned long long)groups);
		__atomic_add_fetch(&wrong, 1, __ATOMIC_SEQ_CST);
	}
	if (number % 7 == 0)
		usleep(number % 300);
	if (__atomic_exchange_n(&piece->ran, true, __ATOMIC_ACQ_REL))
		__atomic_add_fetch(&wrong, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&runs, 1, __ATOMIC_SEQ_CST);
}

KERNEL(piece_kernel, sizeof(uint32_t))
{
	run_piece(*(uint32_t *)parameters[0], true);
}

static void piece_host(void *argument)
{
	run_piece((uint32_t)(uintptr_t)argument, false);
}

struct list {
	uint32_t numbers[BEFORE];
	uint32_t count;
};

static void list_add(struct list *list, uint32_t number)
{
	for (uint32_t i = 0; i < list->count; i++)
		if (list->numbers[i] == number)
			return;
	if (!number)
		return;
	CHECK(list->count < BEFORE);
	list->numbers[list->count++] = number;
}

static void list_join(struct list *list, const struct list *other)
{
	for (uint32_t i = 0; i < other->count; i++)
		list_add(list, other->numbers[i]);
}

struct modelled {
	CUstream stream;
	bool blocking, legacy;
	struct list last;	/* what the next piece there comes behind */
};

struct model {
	struct modelled streams[STREAMS];
	size_t count;
	CUevent events[EVENTS];
	struct list recorded[EVENTS];
	CUfunction function;
	CUdeviceptr memory;
	unsigned int seed;
	bool alone;		/* it sets the limits, too */
	bool legacy;
	const CUstream *shared;		/* the streams that other threads have, too; NULL: none */
	uint64_t mask;
	uint32_t steps;
	pthread_t thread;
};

/* What something in a stream comes behind. */
static struct list behind(struct model *model, struct modelled *at)
{
	struct list list = at->last;

	for (size_t i = 0; i < model->count; i++) {
		struct modelled *other = &model->streams[i];

		if (other != at && ((at->legacy && other->blocking) || (at->blocking && other->legacy)))
			list_join(&list, &other->last);
	}
	return list;
}

static void has_run(const struct list *list, const char *what)
{
	for (uint32_t i = 0; i < list->count; i++)
		if (!__atomic_load_n(&pieces[list->numbers[i]].ran, __ATOMIC_ACQUIRE)) {
			fprintf(stderr, "%s: %u has not run\n", what, list->numbers[i]);
			__atomic_add_fetch(&wrong, 1, __ATOMIC_SEQ_CST);
		}
}

static void put(struct model *model, struct modelled *at, bool kernel)
{
	const struct list list = behind(model, at);
	uint32_t number = __atomic_fetch_add(&next_piece, 1, __ATOMIC_SEQ_CST);
	void *parameters[] = { &number };

	CHECK(number < MOST);
	memcpy(pieces[number].before, list.numbers, sizeof(list.numbers));
	pieces[number].count = list.count;
	pieces[number].groups = model->alone ? model->mask : UINT64_MAX;
	if (kernel)
		DO(cuLaunchKernel(model->function, 1, 1, 1, 1, 1, 1, 0, at->stream, parameters, NULL));
	else
		DO(cuLaunchHostFunc(at->stream, piece_host, (void *)(uintptr_t)number));
	at->last = (struct list){ .numbers = { number }, .count = 1 };
}

static void new_stream(struct model *model, struct modelled *at, bool blocking)
{
	(void)model;
	*at = (struct modelled){ .stream = stream_new(blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING),
				 .blocking = blocking };
}

static void begin_model(struct model *model)
{
	model->function = function("piece_kernel");
	DO(cuMemAlloc_v2(&model->memory, 4096));
	if (model->legacy)
		model->streams[model->count++] = (struct modelled){ .stream = NULL, .blocking = false, .legacy = true };
	model->streams[model->count++] = (struct modelled){ .stream = CU_STREAM_PER_THREAD, .blocking = true };
	while (model->count < STREAMS) {
		struct modelled *at = &model->streams[model->count];

		if (model->shared)
			*at = (struct modelled){ .stream = model->shared[model->count], .blocking = model->count % 2 };
		else
			new_stream(model, at, model->count % 2);
		model->count++;
	}
	for (size_t i = 0; i < EVENTS; i++)
		DO(cuEventCreate(&model->events[i], CU_EVENT_DISABLE_TIMING));
}

static void step(struct model *model)
{
	struct modelled *at = &model->streams[(size_t)rand_r(&model->seed) % model->count];
	const size_t event = (size_t)rand_r(&model->seed) % EVENTS;
	const uint64_t masks[] = { 0, FIRST_HALF, SECOND_HALF };
	struct list list;
	char bytes[16];

	switch (rand_r(&model->seed) % 24) {
	default:
		put(model, at, true);
		break;
	case 0: case 1: case 2:
		put(model, at, false);
		break;
	case 3: case 4:
		DO(cuEventRecord(model->events[event], at->stream));
		model->recorded[event] = behind(model, at);
		break;
	case 5: case 6:
		DO(cuStreamWaitEvent(at->stream, model->events[event], 0));
		list_join(&at->last, &model->recorded[event]);
		if (at->last.count > BEFORE / 4)	/* or it grows and grows */
			put(model, at, true);
		break;
	case 7:
		DO(cuEventSynchronize(model->events[event]));
		has_run(&model->recorded[event], "cuEventSynchronize");
		break;
	case 8:
		DO(cuStreamSynchronize(at->stream));
		has_run(&at->last, "cuStreamSynchronize");
		break;
	case 9:
		list = at->last;
		if (cuStreamQuery(at->stream) == CUDA_SUCCESS)
			has_run(&list, "cuStreamQuery");
		break;
	case 10:
		if (!model->legacy)
			break;
		/* A copy in the legacy stream, for which the caller waits. */
		list = behind(model, &model->streams[0]);
		DO(cuMemcpyDtoH_v2(bytes, model->memory, sizeof(bytes)));
		has_run(&list, "cuMemcpyDtoH");
		break;
	case 11:
		if (!model->alone || rand_r(&model->seed) % 2)
			break;
		model->mask = masks[rand_r(&model->seed) % 3];
		CHECK(!detour_limit(device, model->mask));
		break;
	case 12:
		if (rand_r(&model->seed) % 8)
			break;
		DO(cuCtxSynchronize());
		for (size_t i = 0; i < model->count; i++)
			has_run(&model->streams[i].last, "cuCtxSynchronize");
		break;
	case 13:
		if (rand_r(&model->seed) % 8 || at - model->streams < 2 || model->shared)
			break;
		DO(cuStreamDestroy_v2(at->stream));
		new_stream(model, at, at->blocking);
		break;
	}
}

static void *run_model(void *argument)
{
	struct model *model = argument;

	DO(cuCtxSetCurrent(context));
	begin_model(model);
	for (uint32_t i = 0; i < model->steps; i++)
		step(model);
	DO(cuCtxSynchronize());
	for (size_t i = 0; i < model->count; i++)
		has_run(&model->streams[i].last, "the end");
	return NULL;
}

static void no_wake(void)
{
}

/* One thread: where each kernel runs is known. */
static void order(unsigned int seed, uint32_t steps)
{
	struct model model = { .seed = seed, .steps = steps, .alone = true, .legacy = true };

	begin();
	counters_wake = no_wake;
	run_model(&model);
	CHECK(!wrong && runs == next_piece - 1);
}

static bool release;	/* atomically */

KERNEL(waits, sizeof(int))
{
	(void)parameters;
	while (!__atomic_load_n(&release, __ATOMIC_ACQUIRE))
		usleep(100);
}

/* A kernel that is away counts as finished once it is, and not before. */
static void marks(void)
{
	uint64_t submitted, finished;
	CUstream stream;

	begin();
	counters_wake = no_wake;
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	CHECK(!detour_limit(device, FIRST_HALF));
	DO(cuLaunchKernel(function("waits"), 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	for (int i = 0; i < 10; i++) {
		counters_drain(device);
		usleep(1000);
	}
	totals_get(device, &submitted, &finished);
	CHECK(submitted == 1 && finished == 0);
	__atomic_store_n(&release, true, __ATOMIC_RELEASE);
	DO(cuStreamSynchronize(stream));
	counters_drain(device);
	totals_get(device, &submitted, &finished);
	CHECK(submitted == 1 && finished == 1);
}

static void *launch_many(void *stream)
{
	CUfunction looks;

	DO(cuCtxSetCurrent(context));
	looks = function("looks");
	for (int i = 0; i < 16; i++)
		DO(cuLaunchKernel(looks, 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	return NULL;
}

/* A thread that waits for room in its stream, which is full (FAKE_QUEUE), is in the way of no other. */
static void full(void)
{
	CUstream stream, blocking;
	pthread_t thread;

	begin();
	counters_wake = no_wake;
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	blocking = stream_new(CU_STREAM_DEFAULT);
	CHECK(!detour_limit(device, FIRST_HALF));
	DO(cuLaunchKernel(function("waits"), 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	CHECK(!pthread_create(&thread, NULL, launch_many, stream));
	usleep(100000);
	launch(CU_STREAM_PER_THREAD);
	launch(blocking);
	launch(NULL);
	launch(blocking);
	__atomic_store_n(&release, true, __ATOMIC_RELEASE);
	CHECK(!pthread_join(thread, NULL));
	DO(cuCtxSynchronize());
	CHECK(runs == 20);
}

static void *launch_wait(void *stream)
{
	DO(cuCtxSetCurrent(context));
	DO(cuLaunchKernel(function("waits"), 1, 1, 1, 1, 1, 1, 0, stream, nothing, NULL));
	return NULL;
}

/* Nor is one that waits for room for a marker, to others that launch, and to the listening thread. */
static void marked(void)
{
	CUstream stream, other;
	pthread_t thread;

	begin();
	counters_wake = no_wake;
	stream = stream_new(CU_STREAM_NON_BLOCKING);
	other = stream_new(CU_STREAM_NON_BLOCKING);
	CHECK(!pthread_create(&thread, NULL, launch_wait, stream));
	usleep(100000);
	CHECK(!counters_drain(device));
	CHECK(counters_tick() > 0 && !counters_progress(device));
	for (int i = 0; i < 4; i++)
		launch(other);
	DO(cuStreamDestroy_v2(other));
	__atomic_store_n(&release, true, __ATOMIC_RELEASE);
	CHECK(!pthread_join(thread, NULL));
	DO(cuCtxSynchronize());
	CHECK(runs == 4);
	while (!counters_drain(device))
		usleep(1000);
}

static bool over;	/* atomically */

/* In the place of the listening thread: limits, and markers. */
static void *change_limits(void *unused)
{
	const uint64_t masks[] = { FIRST_HALF, 0, SECOND_HALF };

	(void)unused;
	for (size_t i = 0; !__atomic_load_n(&over, __ATOMIC_SEQ_CST); i++) {
		CHECK(!detour_limit(device, masks[i % 3]));
		for (int tick = 0; tick < 5; tick++) {
			counters_tick();
			usleep(100);
		}
	}
	CHECK(!detour_limit(device, 0));
	return NULL;
}

/* Several threads, while limits change; `shared`: in the same streams. */
static void threads(unsigned int seed, uint32_t steps, bool shared)
{
	static struct model models[3];
	static CUstream streams[STREAMS];
	uint64_t submitted, finished;
	pthread_t changer;

	begin();
	counters_wake = no_wake;
	for (size_t i = 0; shared && i < STREAMS; i++)
		streams[i] = stream_new(i % 2 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
	CHECK(!pthread_create(&changer, NULL, change_limits, NULL));
	for (size_t i = 0; i < 3; i++) {
		models[i] = (struct model){
			.seed = seed + (unsigned int)i, .steps = steps, .legacy = !i || shared,
			.shared = shared ? streams : NULL,
		};
		CHECK(!pthread_create(&models[i].thread, NULL, run_model, &models[i]));
	}
	for (size_t i = 0; i < 3; i++)
		CHECK(!pthread_join(models[i].thread, NULL));
	__atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
	CHECK(!pthread_join(changer, NULL));
	DO(cuCtxSynchronize());
	CHECK(!wrong && runs == next_piece - 1);
	/* Markers stand behind the kernels that they count, wherever these ran. */
	do {
		counters_drain(device);
		totals_get(device, &submitted, &finished);
	} while (finished < submitted);
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "placed", placed_everywhere }, { "refused", refused }, { "without", without_green }, { "wide", wide },
	{ "there", refused_there }, { "ends", ends }, { "fork", forks }, { "plain", plain }, { "lifted", lifted },
	{ "away", away }, { "marks", marks }, { "gone", gone }, { "full", full },
	{ "marked", marked },
};

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		if (!strcmp(name, cases[i].name)) {
			cases[i].run();
			return 0;
		}
	CHECK(argc > 3);
	if (!strcmp(name, "order"))
		order((unsigned int)atoi(argv[2]), (uint32_t)atoi(argv[3]));
	else if (!strcmp(name, "threads"))
		threads((unsigned int)atoi(argv[2]), (uint32_t)atoi(argv[3]), false);
	else if (!strcmp(name, "shared"))
		threads((unsigned int)atoi(argv[2]), (uint32_t)atoi(argv[3]), true);
	else
		CHECK(!"a case");
	return 0;
}
