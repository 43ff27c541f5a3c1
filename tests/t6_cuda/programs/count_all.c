/* SPDX-License-Identifier: Apache-2.0 */
/*
 * count_all CASE: launch kernels in one of the possible ways, print "launched N" once all have run (or, in some cases,
 * at a certain moment), and wait for an answer, by which time the test has looked at the page.
 */
#include <signal.h>
#include <sys/wait.h>

#include "common.h"

static uint64_t ran;
static uint64_t launched;	/* accessed atomically */
static CUcontext context;
static CUfunction f;

KERNEL(count, sizeof(int), sizeof(void *))
{
	(void)parameters;
	__atomic_add_fetch(&ran, 1, __ATOMIC_RELAXED);
}

static bool release;

KERNEL(waits, sizeof(int))
{
	(void)parameters;
	while (!__atomic_load_n(&release, __ATOMIC_ACQUIRE))
		usleep(100);
	__atomic_add_fetch(&ran, 1, __ATOMIC_RELAXED);
}

static int one = 1;
static void *nothing;
static void *parameters[] = { &one, &nothing };

static void add(uint64_t kernels)
{
	__atomic_add_fetch(&launched, kernels, __ATOMIC_RELAXED);
}

static void launch(CUstream stream)
{
	DO(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
	add(1);
}

static void done(void)
{
	DO(cuCtxSynchronize());
	CHECK(__atomic_load_n(&ran, __ATOMIC_RELAXED) == launched);
	tell("launched", launched);
}

static CUstream stream_new(void)
{
	CUstream stream;

	DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	return stream;
}

static void plain(void)
{
	for (int i = 0; i < 1000; i++)
		launch(NULL);
	done();
	launch(CU_STREAM_LEGACY);
	done();
	/* A failed launch does not count. */
	EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(f, 0, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	done();
}

static void ways(void)
{
	CUlaunchConfig config = { 1, 1, 1, 1, 1, 1, 0, stream_new(), NULL, 0 };
	CUDA_LAUNCH_PARAMS many = { f, 1, 1, 1, 1, 1, 1, 0, stream_new(), parameters };
	size_t bytes = 16;
	uint64_t buffer[2] = { 1, 0 };
	void *extra[] = { CU_LAUNCH_PARAM_BUFFER_POINTER, buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
			  CU_LAUNCH_PARAM_END };

	for (int i = 0; i < 100; i++) {
		DO(cuLaunchKernelEx(&config, f, parameters, NULL));
		DO(cuLaunchKernelEx_ptsz(&config, f, NULL, extra));
		DO(cuLaunchCooperativeKernel(f, 1, 1, 1, 1, 1, 1, 0, config.hStream, parameters));
		DO(cuLaunchCooperativeKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters));
		DO(cuLaunchKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, CU_STREAM_PER_THREAD, NULL, extra));
		DO(cuLaunchCooperativeKernelMultiDevice(&many, 1, 0));
		add(7);
	}
	done();
}

static void hosts(void *data)
{
	(void)data;
}

/* Copies, host functions and events are no kernels. */
static void others(void)
{
	CUdeviceptr address;
	char text[64] = "";
	CUevent event;

	DO(cuMemAlloc_v2(&address, 1 << 20));
	DO(cuEventCreate(&event, 0));
	launch(NULL);
	DO(cuMemsetD8_v2(address, 1, 1 << 20));
	DO(cuMemcpyHtoD_v2(address, text, sizeof(text)));
	DO(cuMemcpyDtoHAsync_v2(text, address, sizeof(text), NULL));
	DO(cuLaunchHostFunc(NULL, hosts, NULL));
	DO(cuEventRecord(event, NULL));
	DO(cuEventSynchronize(event));
	done();
	DO(cuMemFree_v2(address));
}

static void streams(void)
{
	CUstream many[20];

	for (int i = 0; i < 20; i++)
		many[i] = stream_new();
	for (int i = 0; i < 2000; i++)
		launch(many[i % 20]);
	done();
	/* Streams destroyed with work in them: it is still done, and counted. */
	for (int i = 0; i < 20; i++) {
		for (int j = 0; j < 5; j++)
			launch(many[i]);
		DO(cuStreamDestroy_v2(many[i]));
	}
	done();
	/* New streams, perhaps with the same handles. */
	for (int i = 0; i < 20; i++)
		launch(stream_new());
	done();
}

static void *thread(void *shared)
{
	CUstream stream;

	DO(cuCtxSetCurrent(context));
	stream = stream_new();
	for (int i = 0; i < 200; i++) {
		launch(stream);
		launch(NULL);
		launch((CUstream)shared);
		DO(cuLaunchKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
		add(1);
	}
	/* The thread's own stream is not waited for, and not used again. */
	return NULL;
}

static void threads(void)
{
	pthread_t all[6];
	CUstream shared = stream_new();

	for (int i = 0; i < 6; i++)
		CHECK(!pthread_create(&all[i], NULL, thread, shared));
	for (int i = 0; i < 6; i++)
		pthread_join(all[i], NULL);
	done();
}

static CUgraph graph_of(int kernels)
{
	CUDA_KERNEL_NODE_PARAMS node = { .func = f, 1, 1, 1, 1, 1, 1, 0, parameters };
	CUgraphNode made;
	CUgraph graph;

	DO(cuGraphCreate(&graph, 0));
	for (int i = 0; i < kernels; i++)
		DO(cuGraphAddKernelNode_v2(&made, graph, NULL, 0, &node));
	DO(cuGraphAddEmptyNode(&made, graph, NULL, 0));
	return graph;
}

static void graphs(void)
{
	CUDA_GRAPH_INSTANTIATE_PARAMS params = { 0 };
	CUgraphExecUpdateResultInfo info;
	CUstream stream = stream_new();
	CUgraph inner = graph_of(3), outer = graph_of(2), whole = graph_of(1);
	CUgraphExec execs[4];
	CUgraphNode node, nodes[8];
	size_t count = 8;

	DO(cuGraphAddChildGraphNode(&node, outer, NULL, 0, inner));	/* 5 */
	DO(cuGraphAddChildGraphNode(&node, whole, NULL, 0, outer));	/* 6 */
	DO(cuGraphAddChildGraphNode(&node, whole, NULL, 0, inner));	/* 9 */
	DO(cuGraphInstantiateWithFlags(&execs[0], inner, 0));
	DO(cuGraphInstantiate_v2(&execs[1], outer, NULL, NULL, 0));
	DO(cuGraphInstantiateWithParams(&execs[2], whole, &params));
	DO(cuGraphInstantiateWithParams_ptsz(&execs[3], graph_of(0), &params));
	for (int i = 0; i < 50; i++) {
		DO(cuGraphLaunch(execs[0], stream));
		DO(cuGraphLaunch(execs[1], NULL));
		DO(cuGraphLaunch_ptsz(execs[2], NULL));
		DO(cuGraphLaunch(execs[3], stream));
		add(3 + 5 + 9);
	}
	done();
	/* Nodes that are disabled and enabled, and an update that keeps that. */
	DO(cuGraphGetNodes(inner, nodes, &count));
	DO(cuGraphNodeSetEnabled(execs[0], nodes[0], 0));
	DO(cuGraphNodeSetEnabled(execs[0], nodes[0], 0));
	DO(cuGraphNodeSetEnabled(execs[0], nodes[1], 0));
	DO(cuGraphLaunch(execs[0], stream));
	DO(cuGraphExecUpdate_v2(execs[0], graph_of(3), &info));
	DO(cuGraphLaunch(execs[0], stream));
	DO(cuGraphNodeSetEnabled(execs[0], nodes[1], 1));
	DO(cuGraphLaunch(execs[0], stream));
	add(1 + 1 + 2);
	done();
	/* The graph is destroyed, the executable one stays. */
	DO(cuGraphDestroy(outer));
	DO(cuGraphLaunch(execs[1], stream));
	add(5);
	done();
	DO(cuGraphExecDestroy(execs[1]));
	DO(cuGraphInstantiateWithFlags(&execs[1], graph_of(4), 0));
	DO(cuGraphLaunch(execs[1], stream));
	add(4);
	done();
}

static void *meanwhile(void *stop)
{
	CUstream stream;

	DO(cuCtxSetCurrent(context));
	stream = stream_new();
	while (!__atomic_load_n((bool *)stop, __ATOMIC_ACQUIRE)) {
		launch(stream);
		usleep(200);
	}
	return NULL;
}

/* Captured work is no launch until the graph is launched; and the capture gets only the program's own nodes. */
static void capture(CUstreamCaptureMode mode)
{
	CUstream stream = stream_new(), other = stream_new(), idle;
	bool stop = false;
	pthread_t beside;
	CUgraph graph, second;
	CUgraphExec exec, inner;
	CUevent fork, join;
	size_t count = 0;

	DO(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
	DO(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
	DO(cuGraphInstantiateWithFlags(&inner, graph_of(3), 0));
	CHECK(!pthread_create(&beside, NULL, meanwhile, &stop));
	for (int round = 0; round < 20; round++) {
		/* Launches that are not yet known to be finished. */
		for (int i = 0; i < 5; i++) {
			launch(stream);
			launch(other);
		}
		DO(cuStreamBeginCapture_v2(stream, mode));
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
		usleep(5000);
		DO(cuEventRecord(fork, stream));
		DO(cuStreamWaitEvent(other, fork, 0));
		DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, other, parameters, NULL));
		DO(cuGraphLaunch(inner, other));
		usleep(5000);
		DO(cuEventRecord(join, other));
		DO(cuStreamWaitEvent(stream, join, 0));
		DO(cuStreamEndCapture(stream, &graph));
		/* Two kernels, a graph, and two events. */
		DO(cuGraphGetNodes(graph, NULL, &count));
		CHECK(count == 5);
		DO(cuGraphInstantiateWithFlags(&exec, graph, 0));
		for (int i = 0; i < 3; i++) {
			DO(cuGraphLaunch(exec, stream));
			add(5);
		}
		DO(cuGraphDestroy(graph));
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELEASE);
	pthread_join(beside, NULL);
	done();
	/* A capture in progress: earlier launches, and those elsewhere, are counted and finished. */
	idle = stream_new();
	for (int i = 0; i < 5; i++)
		launch(idle);
	launch(stream);
	DO(cuStreamSynchronize(stream));
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	DO(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	launch(other);
	DO(cuLaunchKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	add(1);
	tell("submitted", launched);
	DO(cuStreamEndCapture(stream, &second));
	done();
}

/* Finished is what has run, not what is queued. */
static void held(void)
{
	CUfunction w = function("waits");
	CUstream stream = stream_new(), other = stream_new();

	launch(other);
	DO(cuStreamSynchronize(other));
	DO(cuLaunchKernel(w, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	add(1);
	for (int i = 0; i < 700; i++)
		launch(stream);
	/* The same in this thread's own stream. */
	DO(cuLaunchKernel_ptsz(w, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	DO(cuLaunchKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
	add(2);
	tell("submitted", launched);
	launch(other);
	DO(cuStreamSynchronize(other));
	tell("submitted", launched);
	__atomic_store_n(&release, true, __ATOMIC_RELEASE);
	done();
}

static void contexts(void)
{
	CUcontext other;

	DO(cuCtxCreate_v2(&other, 0, 0));
	f = function("count");
	for (int i = 0; i < 100; i++)
		launch(i % 2 ? NULL : CU_STREAM_PER_THREAD);
	DO(cuCtxDestroy_v2(other));
	tell("launched", launched);
	DO(cuCtxSetCurrent(context));
	f = function("count");
	launch(NULL);
	done();
	DO(cuDevicePrimaryCtxReset_v2(0));
	DO(cuCtxSetCurrent(NULL));
	context = start(0);
	f = function("count");
	launch(NULL);
	done();
}

static void devices(void)
{
	launch(NULL);
	done();
	start(1);
	f = function("count");
	launch(NULL);
	launch(NULL);
	DO(cuCtxSynchronize());
	tell("launched", 2);
}

/* Two connections: of a child that was forked before, and of its parent. */
static void forked(void)
{
	pid_t child = fork();
	int status;

	context = start(0);
	f = function("count");
	for (int i = 0; i < (child ? 10 : 5); i++)
		launch(NULL);
	DO(cuCtxSynchronize());
	if (!child) {
		/* The test lets the parent go on once the child's page is right; only then is the child killed. */
		for (;;)
			pause();
	}
	tell("launched", 15);
	kill(child, SIGKILL);
	CHECK(waitpid(child, &status, 0) == child);
}

int main(int argc, char **argv)
{
	const char *name = argv[1];

	(void)argc;
	if (!strcmp(name, "fork"))
		return forked(), 0;
	context = start(0);
	f = function("count");
	if (!strcmp(name, "plain"))
		plain();
	else if (!strcmp(name, "ways"))
		ways();
	else if (!strcmp(name, "others"))
		others();
	else if (!strcmp(name, "streams"))
		streams();
	else if (!strcmp(name, "threads"))
		threads();
	else if (!strcmp(name, "graphs"))
		graphs();
	else if (!strcmp(name, "capture-global"))
		capture(CU_STREAM_CAPTURE_MODE_GLOBAL);
	else if (!strcmp(name, "capture-thread"))
		capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
	else if (!strcmp(name, "capture-relaxed"))
		capture(CU_STREAM_CAPTURE_MODE_RELAXED);
	else if (!strcmp(name, "held"))
		held();
	else if (!strcmp(name, "contexts"))
		contexts();
	else if (!strcmp(name, "devices"))
		devices();
	else
		return 2;
	return 0;
}
