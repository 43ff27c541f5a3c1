// SPDX-License-Identifier: Apache-2.0
/*
 * decodes: a program of the shape of tests/bench/gpu/programs/decode.cu on the double with FAKE_TIMED: each step reads
 * all of its memory, layer by layer.
 *
 *     decodes MIB LAYERS [graph]
 */

#include "common.h"

#include <dlfcn.h>

#define IN_FLIGHT 2
#define LAYERS_MOST 64
#define HASH_RATE UINT64_C(2000000000000)	/* bytes a second */

static void (*read_there)(CUdeviceptr address, uint64_t bytes);
static void (*run_for)(uint64_t ns);
static unsigned int (*rows)(void);

KERNEL(read_all, sizeof(CUdeviceptr), sizeof(uint64_t));
void read_all(void **parameters)
{
	read_there(*(CUdeviceptr *)parameters[0], *(uint64_t *)parameters[1]);
}

/* The kernel of hash.cu: nothing of what this program has ever changes. */
KERNEL(ggroup_hash, sizeof(CUdeviceptr), sizeof(uint64_t), sizeof(void *), sizeof(uint64_t), sizeof(uint64_t));
void ggroup_hash(void **parameters)
{
	const uint64_t vectors = *(uint64_t *)parameters[1] * rows();
	uint64_t *sums = *(uint64_t **)parameters[2];

	run_for(vectors * 16 * 1000 / (HASH_RATE / 1000000));
	for (uint64_t i = 0; i < vectors / 16384; i++)
		sums[2 * i] = sums[2 * i + 1] = 1;
}

static void *of_double(const char *name)
{
	void *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);

	CHECK(found);
	return found;
}

int main(int argc, char **argv)
{
	CHECK(argc > 2);
	const int layers = atoi(argv[2]);
	const uint64_t bytes = (strtoull(argv[1], NULL, 10) << 20) / (uint64_t)layers;
	const bool graph = argc > 3;
	bool (*is_over)(uint64_t passes);
	CUdeviceptr layer[LAYERS_MOST];
	CUevent events[IN_FLIGHT];
	CUgraphExec exec = NULL;
	CUstream stream;
	CUfunction kernel;
	uint64_t launched = 0, passes = 0;

	*(void **)&read_there = of_double("fake_timed_read");
	*(void **)&run_for = of_double("fake_timed_run");
	*(void **)&rows = of_double("fake_launch_rows");
	*(void **)&is_over = of_double("fake_timed_passes");
	start(0);
	kernel = function("read_all");
	DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < layers; i++)
		DO(cuMemAlloc_v2(&layer[i], bytes));
	for (int i = 0; i < IN_FLIGHT; i++)
		DO(cuEventCreate(&events[i], CU_EVENT_DISABLE_TIMING));
	for (int captured = graph; captured >= 0; captured--) {
		CUgraph made;

		while (!captured && !is_over(passes)) {
			if (launched - passes >= IN_FLIGHT) {
				DO(cuEventSynchronize(events[launched % IN_FLIGHT]));
				passes++;
			}
			if (exec)
				DO(cuGraphLaunch(exec, stream));
			for (int i = 0; i < layers && !exec; i++) {
				void *parameters[] = { &layer[i], (void *)&bytes };

				DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
			}
			DO(cuEventRecord(events[launched % IN_FLIGHT], stream));
			launched++;
		}
		if (!captured)
			break;
		DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
		for (int i = 0; i < layers; i++) {
			void *parameters[] = { &layer[i], (void *)&bytes };

			DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
		}
		DO(cuStreamEndCapture(stream, &made));
		DO(cuGraphInstantiateWithFlags(&exec, made, 0));
		DO(cuGraphDestroy(made));
	}
	DO(cuStreamSynchronize(stream));
	return 0;
}
