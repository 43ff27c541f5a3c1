// SPDX-License-Identifier: Apache-2.0
/* Streams whose capture begins or ends, and streams that are destroyed. */

#include "counters.h"
#include "detour.h"
#include "driver.h"
#include "gate.h"
#include "ours.h"
#include "stream.h"
#include "turn.h"
#include "wrapper.h"

static void over(CUstream stream, bool per_thread)
{
	struct stream_key key = stream_key(stream, per_thread);

	stream_capture_over(&key);
	counters_capture_ended(stream, per_thread);
}

/* Enter the gate, so that it is not closed between the beginning of a capture and the note of it. Without a turn none
 * begins, as it would keep memory from being moved. */
static bool begin(CUstream stream, bool per_thread)
{
	bool added;

	device_current();
	turn_enter(TURN_OTHER, stream, per_thread);
	ours_enter();
	added = stream_capture_begins(stream, per_thread);
	if (added)
		counters_capture_begins(stream, per_thread);
	/* What is captured begins with a stream at home; and the legacy stream must not be joined meanwhile. */
	if (detour_on())
		detour_home_all();
	return added;
}

static CUresult begun(CUstream stream, bool per_thread, CUresult result)
{
	/* A second begin in a stream that is captured fails, and the first capture goes on. */
	if (result && !stream_captured(stream, per_thread))
		over(stream, per_thread);
	ours_leave();
	gate_leave();
	return result;
}

#define BEGIN(name, parameters, arguments, per_thread)			\
	WRAPPER name parameters						\
	{								\
		PASS_INSIDE(name, arguments);				\
		if (!begin(hStream, per_thread)) {			\
			ours_leave();					\
			gate_leave();					\
			return CUDA_ERROR_OUT_OF_MEMORY;		\
		}							\
		return begun(hStream, per_thread, real.name arguments);	\
	}

BEGIN(cuStreamBeginCapture, (CUstream hStream), (hStream), false)
BEGIN(cuStreamBeginCapture_ptsz, (CUstream hStream), (hStream), true)
BEGIN(cuStreamBeginCapture_v2, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode), false)
BEGIN(cuStreamBeginCapture_v2_ptsz, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode),
      true)

#define TO_GRAPH								\
	(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,	\
	 const CUgraphEdgeData *dependencyData, size_t numDependencies,		\
	 CUstreamCaptureMode mode)
#define TO_GRAPH_ARGUMENTS (hStream, hGraph, dependencies, dependencyData, numDependencies, mode)
BEGIN(cuStreamBeginCaptureToGraph, TO_GRAPH, TO_GRAPH_ARGUMENTS, false)
BEGIN(cuStreamBeginCaptureToGraph_ptsz, TO_GRAPH, TO_GRAPH_ARGUMENTS, true)

/* Whatever the driver answers, an invalidated capture is over too; a call of the wrong thread ends nothing. */
static CUresult ended(CUstream stream, bool per_thread, CUresult result)
{
	if (result == CUDA_SUCCESS || !stream_captured(stream, per_thread))
		over(stream, per_thread);
	ours_leave();
	return result;
}

#define END(name, per_thread)							\
	WRAPPER name(CUstream hStream, CUgraph *phGraph)			\
	{									\
		PASS_INSIDE(name, (hStream, phGraph));				\
		ours_enter();							\
		return ended(hStream, per_thread, real.name(hStream, phGraph));	\
	}

END(cuStreamEndCapture, false)
END(cuStreamEndCapture_ptsz, true)

/* Inside the gate, so that the mover's look at running work cannot coincide with the end of a stream. */
#define DESTROY(name)							\
	WRAPPER name(CUstream hStream)					\
	{								\
		struct stream_key key = { .stream = hStream };		\
		CUresult result;					\
									\
		PASS_INSIDE(name, (hStream));				\
		gate_enter();						\
		ours_enter();						\
		/* 0, 1 and 2 are no streams that can be destroyed. */	\
		if ((uintptr_t)hStream > 2) {				\
			if (__atomic_load_n(&detour_known, __ATOMIC_RELAXED))	\
				detour_stream_ends(hStream);		\
			counters_stream_gone(hStream);			\
			stream_capture_over(&key);				\
		}							\
		result = real.name(hStream);				\
		ours_leave();						\
		gate_leave();						\
		return result;						\
	}

DESTROY(cuStreamDestroy)
DESTROY(cuStreamDestroy_v2)
