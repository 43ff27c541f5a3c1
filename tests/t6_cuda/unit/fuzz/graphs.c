// SPDX-License-Identifier: Apache-2.0
/* Graphs that allocate: copies go to the program's address, wherever its memory has moved meanwhile. */
#include "steps.h"

#include "calls.h"
#include "model.h"
#include "moves.h"

static void capture(const struct plain *from, const struct plain *to, CUgraph *graph)
{
	const CUstream stream = model.streams[0];
	CUdeviceptr between;

	DO(cuStreamBeginCapture_v2, (stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	DO(cuMemAllocAsync, (&between, PAGE, stream));
	DO(cuMemcpyDtoDAsync_v2, (between, from->address, 8, stream));
	DO(cuMemcpyDtoDAsync_v2, (to->address, between, 8, stream));
	if (to->bytes >= PAGE)
		DO(cuMemcpyDtoDAsync_v2, (to->address + PAGE - 8, between, 8, stream));
	DO(cuMemFreeAsync, (between, stream));
	DO(cuStreamEndCapture, (stream, graph));
}

void graphs_run(void)
{
	const struct plain *from = model_plain();
	struct plain *to = model_plain();
	CUgraphExec exec;
	CUgraph graph;

	if (!from || from == to || !from->contents.written[0] || to->bytes < 16)
		return;
	capture(from, to, &graph);
	DO(cuGraphInstantiateWithFlags, (&exec, graph, 0));
	for (uint64_t i = 1 + model_any(3); i; i--) {
		moves_now();
		DO(cuGraphLaunch, (exec, model.streams[1]));
		DO(cuStreamSynchronize, (model.streams[1]));
	}
	to->contents.word[0] = from->contents.word[0];
	to->contents.written[0] = true;
	DO(cuGraphExecDestroy, (exec));
}
