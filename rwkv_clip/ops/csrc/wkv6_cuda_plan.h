// How a call is cut into thread blocks, and the launches that each pair of element types compiles for itself.
#pragma once

#include "cuda_launch.cuh"
#include "wkv6_cuda_job.cuh"

namespace wkv6 {

struct Plan {
    int blocks, chunks, groups;
    int last_blocks;                // of the last chunk's thread blocks: few when only a few tokens are left
    size_t shared_bytes;            // of the main kernel
    size_t states_shared_bytes;     // of states_kernel
    size_t states_bytes, gu_bytes, decays_bytes;  // workspace, in this order
    int ahead;
    int error;

    bool chunked() const { return chunks > 1 || blocks < 3; }
    size_t workspace_bytes() const { return states_bytes + gu_bytes + decays_bytes; }
};

// Calls function(blocks, chunked) with the sizes as constants, those that the kernels are compiled for.
template <bool kSplit, class Function>
auto with_size(int blocks, bool chunked, Function function) {
    if (chunked) {
        if (blocks == 1) return function(Constant<1>{}, std::true_type{});
        if (blocks == 2) return function(Constant<2>{}, std::true_type{});
        return function(Constant<4>{}, std::true_type{});
    }
    if (blocks == 5) return function(Constant<5>{}, std::false_type{});
    if constexpr (!kSplit) {
        if (blocks == 3) return function(Constant<3>{}, std::false_type{});
    }
    return function(Constant<4>{}, std::false_type{});
}

// function(groups) with the number of channel groups as a constant where a kernel is compiled for it, else with 0.
template <int kBlocks, class Function>
auto with_groups(int groups, Function function) {
    if constexpr (kBlocks == 4) {
        if (groups == 4) return function(Constant<4>{});
        if (groups == 5) return function(Constant<5>{});
    }
    return function(Constant<0>{});
}

template <class Element, class W>
int launch_forward(const Job& job, const Plan& plan);
template <class Element, class W>
int launch_backward(const Job& job, const Plan& plan);

}  // namespace wkv6
