// SPDX-License-Identifier: Apache-2.0
/*
 * sets: a program of eight allocations of 2 MiB, 0 to 7, that does what each line says, and answers it with "done" and
 * the number of those that are on the GPU, as bits.
 *
 *   use 530       a kernel adds one to each of these, one after the other
 *   map 530       the same by tensor maps
 *   graph 530     the same, in a graph of so many kernels that is made by the first such line
 *   look          nothing
 *   export        other processes may open the first one
 *   end           it checks them, and ends
 */

#include "common.h"

#include <dlfcn.h>

#define BYTES (2 << 20)
#define COUNT 8

static uint64_t *on_cpu[COUNT];	/* expected contents of each */
static CUdeviceptr address[COUNT];
static CUtensorMap maps[COUNT];
static CUgraphExec exec;
static char in_graph[COUNT + 1];

KERNEL(add_one, sizeof(CUdeviceptr));
void add_one(void **parameters)
{
	**(uint64_t **)parameters[0] += 1;
}

/* Uses the memory that the real map describes, which the double cannot read from the map. */
KERNEL(add_mapped, sizeof(CUtensorMap));
void add_mapped(void **parameters)
{
	for (int i = 0; i < COUNT; i++)
		if (!memcmp(parameters[0], &maps[i], sizeof(maps[i])))
			*(uint64_t *)address[i] += 1;
}

static void launch(const char *which, bool mapped, CUstream stream)
{
	CUfunction kernel = function(mapped ? "add_mapped" : "add_one");

	for (const char *of = which; *of >= '0' && *of < '0' + COUNT; of++) {
		void *parameters[] = { mapped ? (void *)&maps[*of - '0'] : (void *)&address[*of - '0'] };

		DO(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	}
}

static void count_on_cpu(const char *which)
{
	for (const char *of = which; *of >= '0' && *of < '0' + COUNT; of++)
		on_cpu[*of - '0'][0]++;
}

static void make_graph(const char *which)
{
	CUstream stream;
	CUgraph graph;

	DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	launch(which, false, stream);
	DO(cuStreamEndCapture(stream, &graph));
	DO(cuGraphInstantiateWithFlags(&exec, graph, 0));
	DO(cuGraphDestroy(graph));
	snprintf(in_graph, sizeof(in_graph), "%.*s", (int)strspn(which, "01234567"), which);
}

static uint64_t on_gpu(void)
{
	int (*place)(CUdeviceptr) = (int (*)(CUdeviceptr))dlsym(RTLD_DEFAULT, "fake_memory_place");
	uint64_t bits = 0;

	CHECK(place);
	for (int i = 0; i < COUNT; i++)
		bits |= (uint64_t)(place(address[i]) == CU_MEM_LOCATION_TYPE_DEVICE) << i;
	return bits;
}

static void encode(int i)
{
	const cuuint64_t dim[] = { BYTES }, strides[] = { 0 };
	const cuuint32_t ones[] = { 1 };

	DO(cuTensorMapEncodeTiled(&maps[i], CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, (void *)address[i], dim, strides, ones,
				  ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
				  CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

int main(void)
{
	CUipcMemHandle handle;
	char line[32];

	start(0);
	for (int i = 0; i < COUNT; i++) {
		on_cpu[i] = malloc(BYTES);
		CHECK(on_cpu[i]);
		DO(cuMemAlloc_v2(&address[i], BYTES));
		number(address[i], on_cpu[i], BYTES);
		encode(i);
	}
	puts("ready 0");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin) && strcmp(line, "end\n")) {
		const char *which = strchr(line, ' ') ? strchr(line, ' ') + 1 : "";

		if (!strncmp(line, "use", 3) || !strncmp(line, "map", 3)) {
			launch(which, line[0] == 'm', NULL);
			count_on_cpu(which);
		} else if (!strncmp(line, "graph", 5)) {
			if (!exec)
				make_graph(which);
			DO(cuGraphLaunch(exec, NULL));
			count_on_cpu(in_graph);
		} else if (!strncmp(line, "export", 6)) {
			DO(cuIpcGetMemHandle(&handle, address[0]));
		}
		DO(cuCtxSynchronize());
		printf("done %llu\n", (unsigned long long)on_gpu());
		fflush(stdout);
	}
	for (int i = 0; i < COUNT; i++) {
		uint64_t *data = malloc(BYTES);

		CHECK(data);
		DO(cuMemcpyDtoH_v2(data, address[i], BYTES));
		CHECK(!memcmp(data, on_cpu[i], BYTES));
		free(data);
		DO(cuMemFree_v2(address[i]));
	}
	return 0;
}
