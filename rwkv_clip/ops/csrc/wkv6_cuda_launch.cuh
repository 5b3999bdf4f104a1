// The launches of wkv6_cuda_plan.h. A file per pair of element types includes this, so that they compile side by side.
#pragma once

#include "wkv6_cuda_backward.cuh"
#include "wkv6_cuda_forward.cuh"
#include "wkv6_cuda_plan.h"

namespace wkv6 {

// The main kernel for some of the chunks, in thread blocks of `blocks` warps.
template <class Element, class W, bool kBackward>
int launch_chunks(Job job, const Plan& plan, int blocks, int first, int count) {
    job.first_chunk = first;
    return with_size<Element::kSplit>(blocks, plan.chunked(), [&](auto blocks, auto chunked) {
        constexpr int kBlocks = decltype(blocks)::value;
        constexpr bool kChunked = decltype(chunked)::value;
        const int heads = job.params.B * job.params.H;
        if constexpr (kBackward) {
            const BackwardLayout<Element::kSplit, kBlocks, kChunked> layout(plan.groups);
            return launch(backward_kernel<Element, W, kBlocks, kChunked>, heads, count, 32 * kBlocks, layout.bytes,
                          job);
        } else {
            const ForwardLayout<Element::kSplit, kBlocks, kChunked> layout(plan.groups);
            return launch(forward_kernel<Element, W, kBlocks, kChunked>, heads, count, 32 * kBlocks, layout.bytes, job);
        }
    });
}

template <class Element, class W, bool kBackward>
int launch_all(const Job& job, const Plan& plan) {
    if (plan.chunks > 1) {
        const int error = with_size<Element::kSplit>(plan.blocks, true, [&](auto blocks, auto chunked) {
            constexpr int kBlocks = decltype(blocks)::value;
            if constexpr (decltype(chunked)::value) {
                return with_groups<kBlocks>(plan.groups, [&](auto groups) {
                    return launch(states_kernel<Element, W, kBlocks, kBackward, decltype(groups)::value>,
                                  (kBackward ? 2 : 1) * job.params.B * job.params.H, 1, 32 * kBlocks,
                                  plan.states_shared_bytes, job);
                });
            }
            return 0;
        });
        if (error) return error;
    }
    const int full = plan.chunks - (plan.last_blocks < plan.blocks);
    if (full) {
        const int error = launch_chunks<Element, W, kBackward>(job, plan, plan.blocks, 0, full);
        if (error || full == plan.chunks) return error;
    }
    return launch_chunks<Element, W, kBackward>(job, plan, plan.last_blocks, full, 1);
}

template <class Element, class W>
int launch_forward(const Job& job, const Plan& plan) {
    return launch_all<Element, W, false>(job, plan);
}

template <class Element, class W>
int launch_backward(const Job& job, const Plan& plan) {
    return launch_all<Element, W, true>(job, plan);
}

#define WKV6_COMPILE(Element, W)                                      \
    template int launch_forward<Element, W>(const Job&, const Plan&); \
    template int launch_backward<Element, W>(const Job&, const Plan&);

}  // namespace wkv6
