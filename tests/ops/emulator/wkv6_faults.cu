// Kernels with one fault each, by which the tests see that the emulator and its checks find them.
#include "wkv6_cuda_plan.h"

namespace {

using wkv6::Job;

__device__ float* shared_floats() { return wkv6::shared_pointer<float>(wkv6::shared_memory()); }
__device__ float* y(const Job& job) { return static_cast<float*>(job.params.y.data); }
__device__ const float* r(const Job& job) { return static_cast<const float*>(job.params.r.data); }

__global__ void none(const Job job) {
    const int i = threadIdx.x;
    shared_floats()[i] = r(job)[i];
    __syncthreads();
    y(job)[i] = shared_floats()[i ^ 32];
}

__global__ void no_barrier_between_warps(const Job job) {
    const int i = threadIdx.x;
    shared_floats()[i] = r(job)[i];
    __syncwarp();
    y(job)[i] = shared_floats()[i ^ 32];
}

__global__ void no_barrier_in_a_warp(const Job job) {
    const int i = threadIdx.x;
    shared_floats()[i] = r(job)[i];
    y(job)[i] = shared_floats()[i ^ 1] + __shfl_xor_sync(~0u, 0.f, 1);
}

__global__ void no_barrier_before_writing_again(const Job job) {
    const int i = threadIdx.x;
    shared_floats()[i] = r(job)[i];
    __syncthreads();
    y(job)[i] = shared_floats()[i ^ 32];
    shared_floats()[i] = 0.f;
}

__global__ void beyond_shared_memory(const Job job) { y(job)[threadIdx.x] = shared_floats()[64 + threadIdx.x]; }

__global__ void beyond_the_input(const Job job) { y(job)[threadIdx.x] = r(job)[threadIdx.x + 1]; }

__global__ void beyond_the_output(const Job job) { y(job)[threadIdx.x + 1] = 0.f; }

__global__ void writes_twice(const Job job) {
    y(job)[threadIdx.x] = 0.f;
    y(job)[threadIdx.x ^ 1] = 0.f;
}

__global__ void leaves_out_a_value(const Job job) {
    if (threadIdx.x < 63) y(job)[threadIdx.x] = 0.f;
}

__global__ void reads_fresh_scratch_memory(const Job job) {
    y(job)[threadIdx.x] = static_cast<const float*>(job.params.workspace)[threadIdx.x];
}

__global__ void misaligned(const Job job) {
    const float4 value = wkv6::load_shared<float4>(4 * (threadIdx.x & 1));
    y(job)[threadIdx.x] = value.x;
}

__global__ void a_lane_leaves(const Job job) {
    if (threadIdx.x == 5) return;
    __syncthreads();
    y(job)[threadIdx.x] = 0.f;
}

__global__ void lanes_at_different_collectives(const Job job) {
    if (threadIdx.x & 1) {
        __syncwarp();
    } else {
        y(job)[threadIdx.x] = __shfl_xor_sync(~0u, 0.f, 2);
    }
}

}  // namespace

// Runs kernel number `fault` on 64 floats.
extern "C" int wkv6_fault(int fault, const WKV6Params* params) {
    void (*const kernels[])(Job) = {none,
                                    no_barrier_between_warps,
                                    no_barrier_in_a_warp,
                                    no_barrier_before_writing_again,
                                    beyond_shared_memory,
                                    beyond_the_input,
                                    beyond_the_output,
                                    writes_twice,
                                    leaves_out_a_value,
                                    reads_fresh_scratch_memory,
                                    misaligned,
                                    a_lane_leaves,
                                    lanes_at_different_collectives};
    Job job = {};
    job.params = *params;
    return emulator::launch(kernels[fault], 1, 1, 64, 64 * sizeof(float), job);
}

extern "C" const char* wkv6_fault_message() { return emulator::message; }
