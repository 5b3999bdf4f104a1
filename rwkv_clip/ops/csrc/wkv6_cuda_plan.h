// How a call is cut into thread blocks, and the launches that each pair of element types compiles for itself.
#pragma once

#include "cuda_launch.cuh"
#include "wkv6_cuda_job.cuh"

namespace wkv6 {

struct Plan {
    int blocks, chunks, groups;
    size_t shared_bytes;            // of the main kernel
    size_t states_shared_bytes;     // of states_kernel
    size_t states_bytes, gu_bytes;  // workspace, in this order
    int ahead;
    int error;

    size_t workspace_bytes() const { return states_bytes + gu_bytes; }
};

// Calls function(blocks, chunked) with the plan's sizes as constants, those that the kernels are compiled for.
template <class Function>
auto with_size(const Plan& plan, Function function) {
    if (plan.chunks > 1 || plan.blocks < 4) {
        if (plan.blocks == 1) return function(Constant<1>{}, std::true_type{});
        if (plan.blocks == 2) return function(Constant<2>{}, std::true_type{});
        return function(Constant<4>{}, std::true_type{});
    }
    if (plan.blocks == 5) return function(Constant<5>{}, std::false_type{});
    return function(Constant<4>{}, std::false_type{});
}

template <class Element, class W>
int launch_forward(const Job& job, const Plan& plan);
template <class Element, class W>
int launch_backward(const Job& job, const Plan& plan);

}  // namespace wkv6
