/* SPDX-License-Identifier: Apache-2.0 */
/* LINK_LIBRARY: gate_all CASE: tests of the gate from the inside; the library is part of this program. */
#include <sys/wait.h>

#include "common.h"
#include "driver.h"
#include "gate.h"
#include "library.h"

#define THREADS 4
#define ROUNDS 300

static bool shut;	/* between gate_close and gate_open; accessed atomically */
static bool stop;
static uint64_t launches;
static CUcontext context;

KERNEL(nothing, sizeof(int))
{
	(void)parameters;
}

static __typeof__(&cuLaunchKernel) real_launch;

/* Stands between the wrapper and the driver: nothing may come here while the gate is closed. */
static CUresult spy(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
		    unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra)
{
	CUresult result;

	CHECK(!__atomic_load_n(&shut, __ATOMIC_SEQ_CST));
	result = real_launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
	CHECK(!__atomic_load_n(&shut, __ATOMIC_SEQ_CST));
	__atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
	return result;
}

static void *hammer(void *argument)
{
	CUfunction f;
	CUstream stream;
	int zero = 0;
	void *parameters[] = { &zero };

	(void)argument;
	DO(cuCtxSetCurrent(context));
	f = function("nothing");
	DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	for (int i = 0; !__atomic_load_n(&stop, __ATOMIC_ACQUIRE); i++) {
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
		if (i % 64 == 0)
			DO(cuStreamSynchronize(stream));
	}
	DO(cuStreamSynchronize(stream));
	return NULL;
}

/* Launches from several threads while another opens and closes the gate; and a plain variable that only the closer, and
 * only threads inside, may touch: a sanitizer sees whether the gate orders them. */
static int guarded[THREADS];

static void *inside(void *number)
{
	int *mine = number;

	while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
		gate_enter();
		CHECK(!__atomic_load_n(&shut, __ATOMIC_SEQ_CST));
		(*mine)++;
		gate_enter();
		(*mine)++;
		gate_leave();
		CHECK(!__atomic_load_n(&shut, __ATOMIC_SEQ_CST));
		gate_leave();
	}
	return NULL;
}

static void shut_and_open(void *(*thread)(void *))
{
	pthread_t threads[THREADS];
	uint64_t before;
	long sum = 0;

	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, thread, &guarded[i]));
	for (int round = 0; round < ROUNDS; round++) {
		CHECK(gate_close(10000));
		__atomic_store_n(&shut, true, __ATOMIC_SEQ_CST);
		before = __atomic_load_n(&launches, __ATOMIC_RELAXED);
		for (int i = 0; i < THREADS; i++)
			sum += guarded[i]++;
		sched_yield();
		CHECK(before == __atomic_load_n(&launches, __ATOMIC_RELAXED));
		__atomic_store_n(&shut, false, __ATOMIC_SEQ_CST);
		gate_open();
		/* Otherwise the others would hardly run on a machine of few cores. */
		for (int i = 0; i < 10; i++)
			sched_yield();
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELEASE);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	CHECK(sum > 0);
}

static pthread_barrier_t barrier;

static void *stays(void *argument)
{
	(void)argument;
	gate_enter();
	pthread_barrier_wait(&barrier);	/* it is inside */
	pthread_barrier_wait(&barrier);	/* it may go */
	/* The gate is still open for a thread that is inside already. */
	gate_enter();
	gate_leave();
	gate_leave();
	pthread_barrier_wait(&barrier);
	return NULL;
}

static void timeout(void)
{
	pthread_t thread;
	uint64_t begun;

	CHECK(!pthread_create(&thread, NULL, stays, NULL));
	pthread_barrier_wait(&barrier);
	begun = microseconds();
	CHECK(!gate_close(50));
	CHECK(microseconds() - begun >= 50000);
	/* It is open again. */
	gate_enter();
	gate_leave();
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	pthread_join(thread, NULL);
	CHECK(gate_close(50));
	/* One closer at a time. */
	begun = microseconds();
	CHECK(!gate_close(20));
	CHECK(microseconds() - begun >= 20000);
	gate_open();
	CHECK(gate_close(0));
	gate_open();
}

static void *waits_to_enter(void *entered)
{
	gate_enter();
	__atomic_store_n((bool *)entered, true, __ATOMIC_SEQ_CST);
	gate_leave();
	return NULL;
}

static void nested(void)
{
	pthread_t thread;
	bool entered = false;

	/* The closer itself may be inside. */
	gate_enter();
	CHECK(gate_close(1000));
	CHECK(!pthread_create(&thread, NULL, waits_to_enter, &entered));
	gate_enter();
	gate_leave();
	CHECK(!__atomic_load_n(&entered, __ATOMIC_SEQ_CST));
	gate_open();
	pthread_join(thread, NULL);
	CHECK(entered);
	gate_leave();
	CHECK(gate_close(1000));
	gate_open();
}

static void *ends_capture(void *stream)
{
	CUgraph graph;
	int zero = 0;
	void *parameters[] = { &zero };

	DO(cuCtxSetCurrent(context));
	pthread_barrier_wait(&barrier);
	/* Launches go on while a capture holds the gate open, or it would never end. */
	DO(cuLaunchKernel(function("nothing"), 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	DO(cuStreamEndCapture(stream, &graph));
	return NULL;
}

static void capture(void)
{
	CUstream stream;
	pthread_t thread;
	CUgraph graph;

	DO(cuStreamCreate(&stream, 0));
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	CHECK(!gate_close(20));
	EXPECT(CUDA_ERROR_ILLEGAL_STATE, cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	CHECK(!pthread_create(&thread, NULL, ends_capture, stream));
	pthread_barrier_wait(&barrier);
	CHECK(gate_close(10000));
	gate_open();
	pthread_join(thread, NULL);
	/* A capture that did not begin, or whose context goes, holds nothing. */
	EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL));
	CHECK(gate_close(1000));
	gate_open();
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
	EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &graph));
	CHECK(gate_close(1000));
	gate_open();
}

static void *dies(void *argument)
{
	(void)argument;
	gate_enter();
	gate_enter();
	pthread_barrier_wait(&barrier);
	pthread_exit(NULL);
}

static void death(void)
{
	pthread_t thread;

	for (int i = 0; i < 50; i++) {
		CHECK(!pthread_create(&thread, NULL, dies, NULL));
		pthread_barrier_wait(&barrier);
		CHECK(gate_close(10000));
		gate_open();
		pthread_join(thread, NULL);
	}
}

/* A thread that is cancelled while it waits to enter leaves the gate as it was. */
static void cancelled(void)
{
	struct timespec until;
	bool entered = false;
	pthread_t thread;

	for (int i = 0; i < 20; i++) {
		CHECK(gate_close(10000));
		CHECK(!pthread_create(&thread, NULL, waits_to_enter, &entered));
		usleep(5000);
		CHECK(!pthread_cancel(thread));
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec += 60;
		CHECK(!pthread_timedjoin_np(thread, NULL, &until));
		CHECK(!entered);
		gate_open();
	}
	CHECK(gate_close(1000));
	gate_open();
}

static void in_fork(void)
{
	pthread_t thread;
	pid_t child;
	int status;

	CHECK(!pthread_create(&thread, NULL, stays, NULL));
	pthread_barrier_wait(&barrier);
	gate_capture(1);
	child = fork();
	if (!child) {
		/* The child has neither the thread that is inside nor the capture. */
		gate_enter();
		gate_leave();
		_exit(gate_close(1000) ? 0 : 1);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	CHECK(!gate_close(10));
	gate_capture(-1);
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	pthread_join(thread, NULL);
	CHECK(gate_close(1000));
	child = fork();
	if (!child) {
		/* Open, although the parent had closed it. */
		gate_enter();
		gate_leave();
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	gate_open();
}

/* Measure the cost of entering and leaving, in picoseconds. */
static void cost(void)
{
	uint64_t begun = microseconds();

	for (int i = 0; i < 10000000; i++) {
		gate_enter();
		gate_leave();
	}
	printf("%llu\n", (unsigned long long)(microseconds() - begun) / 10);
}

int main(int argc, char **argv)
{
	const char *name = argv[1];

	(void)argc;
	pthread_barrier_init(&barrier, NULL, 2);
	context = start(0);
	library_begin();
	if (!strcmp(name, "launches")) {
		real_launch = real.cuLaunchKernel;
		real.cuLaunchKernel = spy;
		shut_and_open(hammer);
		CHECK(launches > 0);
	} else if (!strcmp(name, "order")) {
		shut_and_open(inside);
	} else if (!strcmp(name, "timeout")) {
		timeout();
	} else if (!strcmp(name, "nested")) {
		nested();
	} else if (!strcmp(name, "capture")) {
		capture();
	} else if (!strcmp(name, "death")) {
		death();
	} else if (!strcmp(name, "cancelled")) {
		cancelled();
	} else if (!strcmp(name, "fork")) {
		in_fork();
	} else if (!strcmp(name, "cost")) {
		cost();
	} else {
		return 2;
	}
	return 0;
}
