// How a call is cut into thread blocks, and how its kernels are launched.
#pragma once

#include <type_traits>

#include "wkv6_cuda_backward.cuh"
#include "wkv6_cuda_forward.cuh"

namespace wkv6 {

struct Plan {
    int blocks, chunks, groups;
    size_t shared_bytes;         // of the main kernel
    size_t states_shared_bytes;  // of chunk_states_kernel
    size_t states_bytes, decays_bytes, gu_bytes;  // workspace, in this order
    int error;

    size_t workspace_bytes() const { return states_bytes + decays_bytes + gu_bytes; }
};

Plan make_plan(const WKV6Params& params, bool backward);
Job make_job(const WKV6Params& params, const Plan& plan);

// Numbers of blocks that the kernels are compiled for. With two bf16 parts, 8 are too many registers.
constexpr int kSizes[] = {4, 5, 8};
constexpr int max_blocks(bool split) { return split ? 5 : 8; }

// Calls function(blocks, chunked) with constants.
template <bool kSplit, class Function>
auto with_size(const Plan& plan, Function function) {
    const std::true_type chunked;
    const std::false_type whole;
    if (plan.chunks > 1) {
        if constexpr (!kSplit) {
            if (plan.blocks == 8) return function(Constant<8>{}, chunked);
        }
        if (plan.blocks == 1) return function(Constant<1>{}, chunked);
        return function(Constant<4>{}, chunked);
    }
    if constexpr (!kSplit) {
        if (plan.blocks == 8) return function(Constant<8>{}, whole);
    }
    if (plan.blocks == 5) return function(Constant<5>{}, whole);
    return function(Constant<4>{}, whole);
}

// Calls function(element, w) with values of the element types.
template <class Function>
int with_types(const WKV6Params& params, Function function) {
    const bool w32 = params.w_dtype == WKV6_FLOAT32;
    if (params.dtype == WKV6_FLOAT32) return function(Float32{}, Float32{});
    if (params.dtype == WKV6_BFLOAT16) return w32 ? function(Bfloat16{}, Float32{}) : function(Bfloat16{}, Bfloat16{});
    return w32 ? function(Float16{}, Float32{}) : function(Float16{}, Float16{});
}

// Launches a kernel; the cudaError_t of that.
template <class Kernel>
int launch(Kernel kernel, int grid_x, int grid_y, int threads, size_t shared_bytes, const Job& job) {
#ifdef WKV6_EMULATE
    emulator::launch(kernel, grid_x, grid_y, threads, shared_bytes, job);
    return 0;
#else
    if (shared_bytes > 48 * 1024) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       static_cast<int>(shared_bytes));
        if (error != cudaSuccess) return error;
    }
    kernel<<<dim3(grid_x, grid_y), threads, shared_bytes, static_cast<cudaStream_t>(job.params.stream)>>>(job);
    return cudaGetLastError();
#endif
}

int forward_shared_bytes(const Plan& plan, bool split);
int backward_shared_bytes(const Plan& plan, bool split);
int states_shared_bytes(const Plan& plan, bool split);

int launch_forward(const Job& job, const Plan& plan);
int launch_backward(const Job& job, const Plan& plan);

}  // namespace wkv6
