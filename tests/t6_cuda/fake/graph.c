// SPDX-License-Identifier: Apache-2.0
/* Graphs: lists of nodes, run in the order in which they were added. */

#include "internal.h"

#include <stdlib.h>
#include <string.h>

struct CUgraphNode_st {
	enum fake_kind kind;
	CUgraphNode next;
	CUgraphNodeType type;
	struct job *job;
	CUDA_KERNEL_NODE_PARAMS kernel;
	CUgraph child;
};

struct CUgraph_st {
	enum fake_kind kind;
	CUgraphNode first, last;
};

/* An executable graph has its own list of steps, so that the graph may change or be destroyed. */
struct step {
	struct step *next;
	CUgraphNode node;	/* that it was made from; only compared */
	struct job *job;
	bool disabled;
	struct step *child;
};

struct CUgraphExec_st {
	enum fake_kind kind;
	CUgraph source;		/* a copy, for a launch of this in a capture */
	struct step *first;
};

CUgraphNode fake_graph_add(CUgraph graph, CUgraphNodeType type, struct job *job)
{
	CUgraphNode node = fake_object(sizeof(*node), FAKE_NODE);

	node->type = type;
	node->job = job;
	if (job)
		fake_job_get(job);
	if (graph->last)
		graph->last->next = node;
	else
		graph->first = node;
	graph->last = node;
	return node;
}

void fake_graph_node_kernel(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
	node->kernel = *params;
	node->kernel.kernelParams = fake_launch_parameters(node->job);
	node->kernel.extra = NULL;
}

static CUgraph copy(CUgraph graph)
{
	CUgraph made = fake_object(sizeof(*made), FAKE_GRAPH);

	for (CUgraphNode node = graph->first; node; node = node->next) {
		CUgraphNode twin = fake_graph_add(made, node->type, node->job);

		twin->kernel = node->kernel;
		twin->child = node->child ? copy(node->child) : NULL;
	}
	return made;
}

static struct step *steps_of(CUgraph graph)
{
	struct step *first = NULL, **end = &first;

	for (CUgraphNode node = graph->first; node; node = node->next) {
		struct step *step = calloc(1, sizeof(*step));

		if (!step)
			fake_die("out of memory");
		step->node = node;
		step->job = node->job;
		if (step->job)
			fake_job_get(step->job);
		step->child = node->child ? steps_of(node->child) : NULL;
		*end = step;
		end = &step->next;
	}
	return first;
}

static void steps_free(struct step *step)
{
	for (struct step *next; step; step = next) {
		next = step->next;
		steps_free(step->child);
		fake_job_put(step->job);
		free(step);
	}
}

static struct step *steps_copy(const struct step *step)
{
	struct step *first = NULL, **end = &first;

	for (; step; step = step->next) {
		struct step *twin = malloc(sizeof(*twin));

		if (!twin)
			fake_die("out of memory");
		*twin = *step;
		twin->next = NULL;
		if (twin->job)
			fake_job_get(twin->job);
		twin->child = steps_copy(step->child);
		*end = twin;
		end = &twin->next;
	}
	return first;
}

static void steps_run(void *argument)
{
	for (struct step *step = argument; step; step = step->next) {
		if (step->disabled)
			continue;
		if (step->job)
			step->job->work(step->job->argument);
		steps_run(step->child);
	}
}

static void steps_done(void *argument)
{
	steps_free(argument);
}

static struct step *step_of(struct step *step, CUgraphNode node)
{
	for (; step; step = step->next) {
		struct step *inner;

		if (step->node == node)
			return step;
		inner = step_of(step->child, node);
		if (inner)
			return inner;
	}
	return NULL;
}

FAKE_EXPORT cuGraphCreate(CUgraph *graph, unsigned int flags)
{
	FAKE(cuGraphCreate);
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	*graph = fake_object(sizeof(**graph), FAKE_GRAPH);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphDestroy(CUgraph graph)
{
	FAKE(cuGraphDestroy);
	fake_check(graph, FAKE_GRAPH, "cuGraphDestroy");
	for (CUgraphNode node = graph->first; node; node = node->next) {
		fake_job_put(node->job);
		__atomic_store_n(&node->kind, FAKE_DEAD, __ATOMIC_RELEASE);
	}
	__atomic_store_n(&graph->kind, FAKE_DEAD, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				    const CUDA_KERNEL_NODE_PARAMS *params)
{
	CUresult result = CUDA_SUCCESS;
	struct job *job;

	FAKE(cuGraphAddKernelNode_v2);
	(void)dependencies;
	(void)count;
	fake_check(graph, FAKE_GRAPH, "cuGraphAddKernelNode");
	job = fake_launch_job(params->func ? params->func : (CUfunction)params->kern, params->kernelParams,
			      params->extra, &result);
	if (!job)
		return result;
	*node = fake_graph_add(graph, CU_GRAPH_NODE_TYPE_KERNEL, job);
	fake_graph_node_kernel(*node, params);
	fake_job_put(job);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				     CUgraph child)
{
	FAKE(cuGraphAddChildGraphNode);
	(void)dependencies;
	(void)count;
	fake_check(graph, FAKE_GRAPH, "cuGraphAddChildGraphNode");
	fake_check(child, FAKE_GRAPH, "cuGraphAddChildGraphNode");
	*node = fake_graph_add(graph, CU_GRAPH_NODE_TYPE_GRAPH, NULL);
	(*node)->child = copy(child);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	FAKE(cuGraphAddEmptyNode);
	(void)dependencies;
	(void)count;
	fake_check(graph, FAKE_GRAPH, "cuGraphAddEmptyNode");
	*node = fake_graph_add(graph, CU_GRAPH_NODE_TYPE_EMPTY, NULL);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	size_t most = *count, found = 0;

	FAKE(cuGraphGetNodes);
	fake_check(graph, FAKE_GRAPH, "cuGraphGetNodes");
	for (CUgraphNode node = graph->first; node; node = node->next, found++)
		if (nodes && found < most)
			nodes[found] = node;
	*count = found;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
	FAKE(cuGraphNodeGetType);
	fake_check(node, FAKE_NODE, "cuGraphNodeGetType");
	*type = node->type;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *child)
{
	FAKE(cuGraphChildGraphNodeGetGraph);
	fake_check(node, FAKE_NODE, "cuGraphChildGraphNodeGetGraph");
	if (node->type != CU_GRAPH_NODE_TYPE_GRAPH)
		return CUDA_ERROR_INVALID_VALUE;
	*child = node->child;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params)
{
	FAKE(cuGraphKernelNodeGetParams_v2);
	fake_check(node, FAKE_NODE, "cuGraphKernelNodeGetParams");
	if (node->type != CU_GRAPH_NODE_TYPE_KERNEL)
		return CUDA_ERROR_INVALID_VALUE;
	*params = node->kernel;
	return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *exec, CUgraph graph)
{
	fake_check(graph, FAKE_GRAPH, "cuGraphInstantiate");
	*exec = fake_object(sizeof(**exec), FAKE_EXEC);
	(*exec)->first = steps_of(graph);
	(*exec)->source = copy(graph);
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *text, size_t bytes)
{
	FAKE(cuGraphInstantiate);
	(void)node, (void)text, (void)bytes;
	return instantiate(exec, graph);
}

FAKE_EXPORT cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *text, size_t bytes)
{
	FAKE(cuGraphInstantiate_v2);
	(void)node, (void)text, (void)bytes;
	return instantiate(exec, graph);
}

FAKE_EXPORT cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	FAKE(cuGraphInstantiateWithFlags);
	(void)flags;
	return instantiate(exec, graph);
}

FAKE_EXPORT cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	FAKE(cuGraphInstantiateWithParams);
	params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
	return instantiate(exec, graph);
}

FAKE_EXPORT cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	FAKE(cuGraphInstantiateWithParams_ptsz);
	params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
	return instantiate(exec, graph);
}

FAKE_EXPORT cuGraphExecDestroy(CUgraphExec exec)
{
	FAKE(cuGraphExecDestroy);
	fake_check(exec, FAKE_EXEC, "cuGraphExecDestroy");
	__atomic_store_n(&exec->kind, FAKE_DEAD, __ATOMIC_RELEASE);
	steps_free(exec->first);
	return CUDA_SUCCESS;
}

static CUresult launch(CUgraphExec exec, struct fake_stream *stream)
{
	fake_check(exec, FAKE_EXEC, "cuGraphLaunch");
	pthread_mutex_lock(&fake_lock);
	if (stream->capture) {
		CUresult result = stream->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;

		if (!result)
			fake_graph_add(stream->capture->graph, CU_GRAPH_NODE_TYPE_GRAPH, NULL)->child =
				copy(exec->source);
		pthread_mutex_unlock(&fake_lock);
		return result;
	}
	pthread_mutex_unlock(&fake_lock);
	return fake_enqueue(stream, CU_GRAPH_NODE_TYPE_GRAPH, steps_run, steps_copy(exec->first), steps_done);
}

FAKE_EXPORT cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
	FAKE(cuGraphLaunch);
	return launch(exec, fake_stream(stream, false));
}

FAKE_EXPORT cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
	FAKE(cuGraphLaunch_ptsz);
	return launch(exec, fake_stream(stream, true));
}

FAKE_EXPORT cuGraphUpload(CUgraphExec exec, CUstream stream)
{
	FAKE(cuGraphUpload);
	fake_check(exec, FAKE_EXEC, "cuGraphUpload");
	fake_stream(stream, false);
	return CUDA_SUCCESS;
}

/* Update from a graph with the same nodes in the same order; each step keeps whether it is disabled. */
static bool update(struct step *step, CUgraph graph)
{
	CUgraphNode node = graph->first;

	for (; step && node; step = step->next, node = node->next) {
		if (!step->job != !node->job || !step->child != !node->child)
			return false;
		if (node->job)
			fake_job_get(node->job);
		fake_job_put(step->job);
		step->job = node->job;
		if (step->child && !update(step->child, node->child))
			return false;
	}
	return !step && !node;
}

FAKE_EXPORT cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	FAKE(cuGraphExecUpdate_v2);
	fake_check(exec, FAKE_EXEC, "cuGraphExecUpdate");
	fake_check(graph, FAKE_GRAPH, "cuGraphExecUpdate");
	info->result = update(exec->first, graph) ? CU_GRAPH_EXEC_UPDATE_SUCCESS :
						    CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
	return info->result ? CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE : CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
	CUresult result = CUDA_SUCCESS;
	struct step *step;
	struct job *job;

	FAKE(cuGraphExecKernelNodeSetParams_v2);
	fake_check(exec, FAKE_EXEC, "cuGraphExecKernelNodeSetParams");
	step = step_of(exec->first, node);
	if (!step)
		return CUDA_ERROR_INVALID_VALUE;
	job = fake_launch_job(params->func, params->kernelParams, params->extra, &result);
	if (!job)
		return result;
	fake_job_put(step->job);
	step->job = job;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled)
{
	struct step *step;

	FAKE(cuGraphNodeSetEnabled);
	fake_check(exec, FAKE_EXEC, "cuGraphNodeSetEnabled");
	step = step_of(exec->first, node);
	if (!step)
		return CUDA_ERROR_INVALID_VALUE;
	step->disabled = !enabled;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int *enabled)
{
	struct step *step;

	FAKE(cuGraphNodeGetEnabled);
	fake_check(exec, FAKE_EXEC, "cuGraphNodeGetEnabled");
	step = step_of(exec->first, node);
	if (!step)
		return CUDA_ERROR_INVALID_VALUE;
	*enabled = !step->disabled;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags)
{
	FAKE(cuGraphDebugDotPrint);
	(void)graph, (void)path, (void)flags;
	return CUDA_ERROR_NOT_SUPPORTED;
}
