// Launch kernels in every possible way, print how many were launched and how many ran, and wait for a line of stdin
// before the end.
#include <cooperative_groups.h>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define CHECK(call)                                                                \
    do {                                                                           \
        cudaError_t e_ = (call);                                                   \
        if (e_ != cudaSuccess) {                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_));            \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

__global__ void one(int *counter) {
    if (threadIdx.x == 0)
        atomicAdd(counter, 1);
}

__global__ void together(int *counter) {
    cooperative_groups::this_grid().sync();
    if (threadIdx.x == 0 && blockIdx.x == 0)
        atomicAdd(counter, 1);
}

int main() {
    int *counter, launched = 0, found;
    CHECK(cudaMalloc(&counter, sizeof *counter));
    CHECK(cudaMemset(counter, 0, sizeof *counter));
    for (int i = 0; i < 1000; i++, launched++)
        one<<<1, 32>>>(counter);
    void *arguments[] = {&counter};
    for (int i = 0; i < 100; i++, launched++)
        CHECK(cudaLaunchCooperativeKernel((void *)together, 4, 32, arguments));
    cudaLaunchConfig_t config = {};
    config.gridDim = 1;
    config.blockDim = 32;
    for (int i = 0; i < 100; i++, launched++)
        CHECK(cudaLaunchKernelEx(&config, one, counter));
    std::vector<cudaStream_t> streams(8);
    for (auto &stream : streams)
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 0; i < 800; i++, launched++)
        one<<<1, 32, 0, streams[i % streams.size()]>>>(counter);
    // A graph of 3 kernels, a copy and a child graph of 2 kernels.
    cudaGraph_t inner, graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal));
    one<<<1, 32, 0, streams[0]>>>(counter);
    one<<<1, 32, 0, streams[0]>>>(counter);
    CHECK(cudaStreamEndCapture(streams[0], &inner));
    CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < 3; i++)
        one<<<1, 32, 0, streams[0]>>>(counter);
    CHECK(cudaStreamEndCapture(streams[0], &graph));
    cudaGraphNode_t child;
    CHECK(cudaGraphAddChildGraphNode(&child, graph, nullptr, 0, inner));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 200; i++, launched += 5)
        CHECK(cudaGraphLaunch(exec, streams[i % 2]));
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([counter] {
            for (int i = 0; i < 250; i++)
                one<<<1, 32, 0, cudaStreamPerThread>>>(counter);
        });
    for (auto &thread : threads)
        thread.join();
    launched += 1000;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(&found, counter, sizeof found, cudaMemcpyDeviceToHost));
    printf("%d %d\n", launched, found);
    fflush(stdout);
    getchar();
    return 0;
}
