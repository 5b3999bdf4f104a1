// The launches of wkv6_cuda_plan.h. A file per pair of element types includes this, so that they compile side by side.
#pragma once

#include "wkv6_cuda_backward.cuh"
#include "wkv6_cuda_forward.cuh"
#include "wkv6_cuda_plan.h"

namespace wkv6 {

template <class Element, class W, bool kBackward>
int launch_all(const Job& job, const Plan& plan) {
    return with_size(plan, [&](auto blocks, auto chunked) {
        constexpr int kBlocks = decltype(blocks)::value;
        constexpr bool kChunked = decltype(chunked)::value;
        const int heads = job.params.B * job.params.H;
        if constexpr (kChunked) {
            const int error = launch(states_kernel<Element, W, kBlocks, kBackward>, (kBackward ? 4 : 2) * heads, 1,
                                     32 * kBlocks, plan.states_shared_bytes, job);
            if (error) return error;
        }
        if constexpr (kBackward) {
            return launch(backward_kernel<Element, W, kBlocks, kChunked>, heads, plan.chunks, 32 * kBlocks,
                          plan.shared_bytes, job);
        } else {
            return launch(forward_kernel<Element, W, kBlocks, kChunked>, heads, plan.chunks, 32 * kBlocks,
                          plan.shared_bytes, job);
        }
    });
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
