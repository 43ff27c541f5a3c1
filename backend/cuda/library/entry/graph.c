// SPDX-License-Identifier: Apache-2.0
/*
 * Graphs: how many kernels each executable graph has, and which memory they use.
 *
 * Kernels are counted when a graph is instantiated, including those of child graphs. The body of a conditional node is
 * chosen on the GPU while the graph runs, so it is unknown here and not counted; nor are launches made by a kernel, of
 * graphs or others. Updating an executable graph does not change the number of kernels (its topology must stay);
 * disabling a node does.
 */

#include <stdlib.h>

#include "burst.h"
#include "counters.h"
#include "detour.h"
#include "driver.h"
#include "gate.h"
#include "heat.h"
#include "life.h"
#include "log.h"
#include "map.h"
#include "ours.h"
#include "stream.h"
#include "turn.h"
#include "wrapper.h"

/* Memory that a kernel's parameters refer to: a pointer, with 0 bytes, or the range that a tensor map describes. */
struct use {
	CUdeviceptr address;
	size_t bytes;
	size_t number;		/* its position in the graph */
};

/* An executable graph. */
struct exec {
	uint64_t kernels;
	/* Memory that the kernels refer to, in the order of the nodes, without duplicates. */
	struct use *uses;
	size_t count, most;
};

static struct map execs;	/* under `lock`; of CUgraphExec to struct exec */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Called for every word of the kernels' parameters. Most are no addresses; only pages_use_from can tell. */
static void add_use(CUdeviceptr address, size_t bytes, void *argument)
{
	struct exec *exec = argument;
	struct use *more;

	/* Skip numbers and sizes: no GPU memory lies in the first 16 MiB or beyond 57 bits. */
	if (address < 16 * GG_MIB || address >> 57)
		return;
	if (exec->count == exec->most) {
		more = realloc(exec->uses, (exec->most * 2 + 16) * sizeof(*more));
		if (!more)
			return;
		exec->uses = more;
		exec->most = exec->most * 2 + 16;
	}
	exec->uses[exec->count] = (struct use){ address, bytes, exec->count };
	exec->count++;
}

static int by_value(size_t left, size_t right)
{
	return (left > right) - (left < right);
}

/* Equal uses begin in the same chunk and have the same length. */
static int by_chunk(const void *a, const void *b)
{
	const struct use *left = a, *right = b;

	if (left->address / GG_CHUNK != right->address / GG_CHUNK)
		return by_value(left->address, right->address);
	return left->bytes != right->bytes ? by_value(left->bytes, right->bytes) :
	       by_value(left->number, right->number);
}

static int by_number(const void *a, const void *b)
{
	return by_value(((const struct use *)a)->number, ((const struct use *)b)->number);
}

/* Removes duplicates; the first of equal uses stays. */
static void each_once(struct exec *exec)
{
	size_t kept = 0;

	if (!exec->count)
		return;
	qsort(exec->uses, exec->count, sizeof(exec->uses[0]), by_chunk);
	for (size_t i = 0; i < exec->count; i++)
		if (!kept || exec->uses[i].address / GG_CHUNK != exec->uses[kept - 1].address / GG_CHUNK ||
		    exec->uses[i].bytes != exec->uses[kept - 1].bytes)
			exec->uses[kept++] = exec->uses[i];
	exec->count = kept;
	qsort(exec->uses, exec->count, sizeof(exec->uses[0]), by_number);
	for (size_t i = 0; i < exec->count; i++)
		exec->uses[i].number = i;
}

/* CUDA_KERNEL_NODE_PARAMS and the like may have a CUkernel in place of a CUfunction. */
#define FUNCTION_OF(parameters)								\
	((parameters)->func ? (parameters)->func : (CUfunction)(parameters)->kern)

static void read_kernel(struct exec *exec, CUgraphNode node)
{
	CUDA_KERNEL_NODE_PARAMS parameters = { 0 };

	exec->kernels++;
	if (!real.cuGraphKernelNodeGetParams_v2 ||
	    real.cuGraphKernelNodeGetParams_v2(node, &parameters))
		return;
	heat_words(FUNCTION_OF(&parameters), parameters.kernelParams, parameters.extra, add_use, exec);
}

static void read_graph(struct exec *exec, CUgraph graph)
{
	CUgraphNode *nodes;
	size_t count = 0;

	if (real.cuGraphGetNodes(graph, NULL, &count) || !count)
		return;
	nodes = calloc(count, sizeof(*nodes));
	if (!nodes || real.cuGraphGetNodes(graph, nodes, &count))
		count = 0;
	for (size_t i = 0; i < count; i++) {
		CUgraphNodeType type;
		CUgraph child;

		if (real.cuGraphNodeGetType(nodes[i], &type))
			continue;
		if (type == CU_GRAPH_NODE_TYPE_KERNEL)
			read_kernel(exec, nodes[i]);
		else if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
			 !real.cuGraphChildGraphNodeGetGraph(nodes[i], &child))
			read_graph(exec, child);
	}
	free(nodes);
}

/* Reads the kernels and uses of a whole graph. */
static struct exec whole(CUgraph graph)
{
	CUstreamCaptureMode mode = driver_enter();
	struct exec exec = { 0 };

	read_graph(&exec, graph);
	each_once(&exec);
	driver_leave(mode);
	return exec;
}

static void free_exec(struct exec *exec)
{
	if (exec)
		free(exec->uses);
	free(exec);
}

static void learn(CUgraphExec handle, CUgraph graph)
{
	struct exec *exec = calloc(1, sizeof(*exec)), *old;

	if (!exec)
		return;
	*exec = whole(graph);
	pthread_mutex_lock(&lock);
	old = map_take(&execs, handle);
	if (!map_put(&execs, handle, exec)) {
		free_exec(exec);
		log_line("no memory to count the kernels of a graph");
	}
	pthread_mutex_unlock(&lock);
	free_exec(old);
}

/* Replaces the uses by those of `graph`. The number of kernels stays, so that disabled nodes stay disabled. */
static void learn_uses(CUgraphExec handle, CUgraph graph)
{
	struct exec fresh = whole(graph), *exec;

	pthread_mutex_lock(&lock);
	exec = map_get(&execs, handle);
	if (exec) {
		struct use *old = exec->uses;

		exec->uses = fresh.uses;
		exec->count = fresh.count;
		exec->most = fresh.most;
		fresh.uses = old;
	}
	pthread_mutex_unlock(&lock);
	free(fresh.uses);
}

/* Adds uses. Those of the replaced parameters stay, since other nodes may share them. */
static void add_uses(CUgraphExec handle, struct exec fresh)
{
	struct exec *exec;

	pthread_mutex_lock(&lock);
	exec = map_get(&execs, handle);
	for (size_t i = 0; exec && i < fresh.count; i++)
		add_use(fresh.uses[i].address, fresh.uses[i].bytes, exec);
	if (exec)
		each_once(exec);
	pthread_mutex_unlock(&lock);
	free(fresh.uses);
}

static void add_kernel(CUgraphExec handle, CUfunction function, void **parameters, void **extra)
{
	CUstreamCaptureMode mode = driver_enter();
	struct exec fresh = { 0 };

	heat_words(function, parameters, extra, add_use, &fresh);
	driver_leave(mode);
	add_uses(handle, fresh);
}

/* A graph is read when it is instantiated, and again when its parameters change. */

/* Copies and fills in it name memory, which is mapped while the driver looks at it. */
#define LOOK_THEN(name, parameters, arguments, then)	\
	WRAPPER name parameters				\
	{						\
		CUresult result;			\
							\
		PASS_INSIDE(name, arguments);		\
		turn_look();				\
		CALL_REAL(result, name, arguments);	\
		gate_leave();				\
		if (result == CUDA_SUCCESS) {		\
			then;				\
		}					\
		return result;				\
	}

#define INSTANTIATE(name, parameters, arguments)						\
	LOOK_THEN(name, parameters, arguments, learn(*phGraphExec, hGraph))
#define WITH_TEXT									\
	(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,		\
	 char *logBuffer, size_t bufferSize)
#define WITH_PARAMS									\
	(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
INSTANTIATE(cuGraphInstantiate, WITH_TEXT,
	    (phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize))
INSTANTIATE(cuGraphInstantiate_v2, WITH_TEXT,
	    (phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize))
INSTANTIATE(cuGraphInstantiateWithFlags,
	    (CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags),
	    (phGraphExec, hGraph, flags))

/* An instantiation that also uploads the graph puts work into a stream. */
#define INSTANTIATE_IN(name)								\
	WRAPPER name WITH_PARAMS							\
	{										\
		const CUDA_GRAPH_INSTANTIATE_PARAMS *const how = instantiateParams;	\
		const bool uploads = how && how->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;	\
		CUresult result;							\
											\
		PASS_INSIDE(name, (phGraphExec, hGraph, instantiateParams));		\
		if (uploads)								\
			turn_enter(TURN_OTHER, how->hUploadStream, PER_THREAD(name));	\
		else								\
			turn_look();						\
		CALL_REAL(result, name, (phGraphExec, hGraph, instantiateParams));	\
		if (uploads)								\
			turn_leave(how->hUploadStream, PER_THREAD(name));		\
		else								\
			gate_leave();						\
		if (result == CUDA_SUCCESS)						\
			learn(*phGraphExec, hGraph);					\
		return result;								\
	}

INSTANTIATE_IN(cuGraphInstantiateWithParams)
INSTANTIATE_IN(cuGraphInstantiateWithParams_ptsz)

#define UPDATE(name, parameters, arguments)							\
	LOOK_THEN(name, parameters, arguments, learn_uses(hGraphExec, hGraph))
UPDATE(cuGraphExecUpdate,
       (CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
	CUgraphExecUpdateResult *updateResult_out),
       (hGraphExec, hGraph, hErrorNode_out, updateResult_out))
UPDATE(cuGraphExecUpdate_v2,
       (CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo),
       (hGraphExec, hGraph, resultInfo))

FORWARD_THEN(cuGraphExecKernelNodeSetParams,
	     (CUgraphExec hGraphExec, CUgraphNode hNode,
	      const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams),
	     (hGraphExec, hNode, nodeParams),
	     add_kernel(hGraphExec, nodeParams->func, nodeParams->kernelParams, nodeParams->extra))
FORWARD_THEN(cuGraphExecKernelNodeSetParams_v2,
	     (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams),
	     (hGraphExec, hNode, nodeParams),
	     add_kernel(hGraphExec, FUNCTION_OF(nodeParams), nodeParams->kernelParams,
			nodeParams->extra))
LOOK_THEN(cuGraphExecNodeSetParams,
	  (CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams),
	     (hGraphExec, hNode, nodeParams),
	     if (nodeParams->type == CU_GRAPH_NODE_TYPE_KERNEL)
		     add_kernel(hGraphExec, FUNCTION_OF(&nodeParams->kernel),
				nodeParams->kernel.kernelParams, nodeParams->kernel.extra))
/* The topology must be that of the node's graph, so the number of kernels stays
 * (cuGraphExecChildGraphNodeSetParams). */
LOOK_THEN(cuGraphExecChildGraphNodeSetParams,
	  (CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph),
	     (hGraphExec, hNode, childGraph), add_uses(hGraphExec, whole(childGraph)))

/* A disabled kernel does not run and is not counted. */
WRAPPER cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)
{
	CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
	unsigned int was = 1;
	struct exec *exec;
	CUresult result;

	PASS_INSIDE(cuGraphNodeSetEnabled, (hGraphExec, hNode, isEnabled));
	ours_enter();
	if (real.cuGraphNodeGetEnabled && hGraphExec && hNode)
		real.cuGraphNodeGetEnabled(hGraphExec, hNode, &was);
	result = real.cuGraphNodeSetEnabled(hGraphExec, hNode, isEnabled);
	if (!result)
		real.cuGraphNodeGetType(hNode, &type);
	if (type == CU_GRAPH_NODE_TYPE_KERNEL && !was != !isEnabled) {
		pthread_mutex_lock(&lock);
		exec = map_get(&execs, hGraphExec);
		if (exec)
			exec->kernels += isEnabled ? 1 : (uint64_t)-1;
		pthread_mutex_unlock(&lock);
	}
	ours_leave();
	return result;
}

/* Marks the memory of a graph as used, and returns how many kernels a launch runs. */
static uint64_t use(CUgraphExec handle)
{
	struct exec *exec;
	uint64_t kernels = 0;

	pthread_mutex_lock(&lock);
	exec = map_get(&execs, handle);
	if (exec) {
		kernels = exec->kernels;
		for (size_t i = 0; heat_is_wanted() && i < exec->count; i++)
			heat_use(exec->uses[i].address, exec->uses[i].bytes);
	}
	pthread_mutex_unlock(&lock);
	return kernels;
}

#define LAUNCH_GRAPH(name, per_thread)							\
	WRAPPER name(CUgraphExec hGraphExec, CUstream hStream)				\
	{										\
		struct device *device;							\
		uint64_t kernels = 0;							\
		CUresult result;							\
											\
		PASS_INSIDE(name, (hGraphExec, hStream));				\
		device = device_current();					\
		turn_enter(TURN_KERNELS, hStream, per_thread);				\
		if (stream_runs(hStream, per_thread))					\
			kernels = use(hGraphExec);					\
		if (kernels)								\
			burst_launched(device);						\
		if (kernels && detour_on())						\
			detour_stay(hStream, per_thread);				\
		else if (detour_on())								\
			detour_home(hStream, per_thread);				\
		CALL_REAL(result, name, (hGraphExec, hStream));				\
		if (!result && device && kernels) {					\
			counters_launched(device, hStream, per_thread, kernels);	\
			burst_launched(device);						\
		}									\
		turn_leave(hStream, per_thread);					\
		return result;								\
	}

LAUNCH_GRAPH(cuGraphLaunch, false)
LAUNCH_GRAPH(cuGraphLaunch_ptsz, true)

WRAPPER cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	struct exec *exec;

	PASS_INSIDE(cuGraphExecDestroy, (hGraphExec));
	/* First: once destroyed, the handle may be given to another graph. */
	pthread_mutex_lock(&lock);
	exec = map_take(&execs, hGraphExec);
	pthread_mutex_unlock(&lock);
	free_exec(exec);
	return real.cuGraphExecDestroy(hGraphExec);
}

static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	execs = (struct map){ 0 };
}

LIFE(.stage = LIFE_CALLS, .forget = forget);
